"""Models in OpenAI's sense: the served model, and the adapters that the engine has loaded."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from core.api.openai_schemas import Deleted, Listed, Model, listed
from core.control import adapters
from core.control.context import Control
from core.errors import NotFound, Unavailable
from db import adapters as adapter_rows
from db import engines as engine_rows
from db.adapters import AdapterAliasRecord, AdapterRecord
from db.engines import EngineRecord

Loaded = AdapterRecord | AdapterAliasRecord


@dataclass(frozen=True)
class Served:
    """Where a model is served, and what the engine calls it."""

    url: str
    model: str


def page(control: Control) -> Listed[Model]:
    """The models that can be asked now; none while no engine is ready."""
    with control.store.read() as session:
        engine = engine_rows.current(session)
        if engine is None or engine.state != "ready":
            return listed([], False)
        loaded = [record for record in adapter_rows.everything(session) if _is_loaded(record, engine)]
        return listed([_base(engine), *(_adapter(record, engine) for record in loaded)], False)


def get(control: Control, model: str) -> Model:
    with control.store.read() as session:
        engine = _ready(session)
        record = _find(session, engine, model)
        return _base(engine) if record is None else _adapter(record, engine)


def delete(control: Control, model: str) -> Deleted:
    """Undeploy and delete the adapter, all versions of it."""
    adapters.delete(control, model, None)
    return Deleted(id=model, object="model")


def served(control: Control, model: str | None) -> Served:
    """Where `model` (None: the base model) is served. Raises Unavailable without an engine, NotFound for what it does
    not serve."""
    with control.store.read() as session:
        engine = _ready(session)
        record = _find(session, engine, model) if model is not None else None
    base = str(engine.hello["model"])
    # The engine addresses an adapter as base:adapter.
    return Served(str(engine.hello["http_url"]), base if record is None else f"{base}:{record.address}")


def _ready(session: Session) -> EngineRecord:
    engine = engine_rows.current(session)
    if engine is None or engine.state != "ready":
        state = "lost" if engine is not None and engine.state == "lost" else "absent"
        raise Unavailable(
            "engine_unavailable", f"the engine is {state}; see `harli doctor` and the Overview page", "model"
        )
    return engine


def _find(session: Session, engine: EngineRecord, model: str) -> Loaded | None:
    """The loaded adapter that `model` names (``name``, ``name@version``, ``name@alias``, each also behind ``base:``);
    None for the base model."""
    base = str(engine.hello["model"])
    if model == base:
        return None
    name, _, version = model.removeprefix(f"{base}:").partition("@")
    is_alias = bool(version) and not version.isdigit()
    record: Loaded | None = adapter_rows.find(session, name)
    if is_alias and record is not None:
        record = adapter_rows.alias(session, name, version)
    if record is None or record.deleted:
        raise NotFound(
            "model_not_found",
            f"there is no model {model}; the engine serves {base} and adapters by their names",
            "model",
        )
    if not _is_loaded(record, engine) or not (is_alias or version in ("", str(record.deployed_version))):
        now = f"version {record.deployed_version} is" if _is_loaded(record, engine) else "no version is"
        raise NotFound(
            "model_not_found",
            f"adapter {model} is not served ({now} now); deploy it first (`harli adapters deploy {name}`)",
            "model",
        )
    return record


def _is_loaded(record: Loaded, engine: EngineRecord) -> bool:
    return not record.deleted and record.deployed_version is not None and record.engine_id == engine.id


def _base(engine: EngineRecord) -> Model:
    return Model(id=str(engine.hello["model"]), created=int(engine.since.timestamp()), owned_by="harli")


def _adapter(record: Loaded, engine: EngineRecord) -> Model:
    if isinstance(record, AdapterRecord):
        version = adapter_rows.version_of(record, record.deployed_version)
        created = version.created_at if version is not None else record.created_at
    else:
        created = record.updated_at
    return Model(
        id=record.address, created=int(created.timestamp()), owned_by=record.tenant, parent=str(engine.hello["model"])
    )
