"""Base models of jobs and adapters: the served one, or another that the engine says jobs may finetune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from core.api import schemas
from core.config import Settings
from core.control import engines
from core.errors import Invalid, Unavailable
from db.adapters import AdapterVersionRecord
from db.engines import EngineRecord


def resolved(body: schemas.JobCreate, engine: EngineRecord | None) -> schemas.JobCreate:
    """The job with `base_model` None where that is the served one. One on another base is not deployed, since it is not
    served. Raises Invalid for a base that the engine (the present one, else the last) does not have, and for what needs
    the adapter served; Unavailable while no engine has been here."""
    name = body.base_model
    if name is None:
        return body
    if engine is None:
        raise Unavailable(
            "base_model", "which base models there are is not known before an engine was here; start it", "base_model"
        )
    served = engine.hello["model"]
    if name == served:
        return body.model_copy(update={"base_model": None})
    base = of(engine, name)
    if base is None:
        others = [one["name"] for one in _all(engine)]
        known = f"{served}, which is served{', ' if others else ''}{', '.join(others)}"
        raise Invalid(
            "base_model",
            f"there is no base model {name}; there are {known}; HARLI_FINETUNE__BASE_MODELS lists those beside the "
            "served one",
            "base_model",
        )
    if base.get("refused"):
        raise Invalid("base_model", f"base model {name} cannot be finetuned: {base['refused']}", "base_model")
    asked = {"deploy": "deploy" in body.model_fields_set and body.deploy, "sample_prompts": bool(body.sample_prompts)}
    for field, given in asked.items():
        if given:
            raise Invalid(
                field,
                f"{field} needs the adapter served, and the engine serves {served}, not {name}; leave it out",
                field,
            )
    return body.model_copy(update={"deploy": False})


def of(engine: EngineRecord | None, name: str | None) -> Mapping[str, Any] | None:
    """What the engine's hello says of a base model other than the served one (`core.link.messages.BaseModel`)."""
    return next((one for one in _all(engine) if one["name"] == name), None)


def _all(engine: EngineRecord | None) -> list[Mapping[str, Any]]:
    return list(engine.hello.get("base_models") or ()) if engine is not None else []


def folder(session: Session, settings: Settings, name: str | None) -> Path | None:
    """Where the base model of that name lies, the served one for None; None when there is nothing yet."""
    engine = engines.known(session)
    if (base := of(engine, name)) is not None:
        return Path(base["path"])
    return engines.model_path(session, settings)


def fits(engine: EngineRecord | None, row: AdapterVersionRecord, name: str | None) -> bool:
    """Whether the version belongs to that base model, the served one for None. What is not known fits."""
    if name is None:
        if engine is None or row.origin == "imported":  # what is uploaded may call the served model anything
            return True
        name = engine.hello["model"]
    return row.base in (None, name)


def unserved(engine: EngineRecord | None, row: AdapterVersionRecord) -> Invalid | None:
    """Why the engine cannot serve the version: it belongs to another base. None when it does not."""
    if engine is None or fits(engine, row, None):
        return None
    return Invalid(
        "base_differs",
        f"adapter {row.name}@{row.version} belongs to base model {row.base} and the engine serves "
        f"{engine.hello['model']}; download it, or start an engine that serves {row.base}",
        "version",
    )
