"""Adapters added up, in this process and off its requests: several to a new version of an adapter, one to its base
model as a folder that anyone can serve."""

from __future__ import annotations

import logging
import shutil
import tarfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.api import schemas
from core.control import adapters, aliases, bases, engines, operations
from core.control.context import Control, new_id
from core.control.operations import Work
from core.errors import Conflict, HarliError, Invalid, NotFound, Unavailable
from core.intake import merge as intake
from core.intake.merge import Part
from db.adapters import AdapterVersionRecord
from db.engines import EngineRecord

logger = logging.getLogger(__name__)
# Models are merged one after the other: each reads and writes as much as the disk gives.
_one = threading.Lock()
_BLOCK = tarfile.BLOCKSIZE


def combine(control: Control, name: str, parts: Sequence[schemas.AdapterPart], new_version: bool) -> schemas.Adapter:
    """Store the weighted sum of adapters as the name's next version."""
    with control.store.read() as session:
        rows = [aliases.resolved(session, part.adapter, "parts") for part in parts]
        engine = engines.known(session)
    base = _base_of(rows, engine)
    adapters.require_name(control, name, new_version)
    folder = control.uploads / new_id("adapter")
    chosen = [
        Part(control.adapter_folder(row.name, row.version), part.weight) for row, part in zip(rows, parts, strict=True)
    ]
    try:
        info = intake.combine(chosen, folder, max_rank=engine.hello["max_lora_rank"] if engine is not None else None)
        adapters.check(control, info, folder, base)
        named = [f"{row.name}@{row.version}*{part.weight:g}" for row, part in zip(rows, parts, strict=True)]
        with control.store.write() as session:
            adapters.require_name_in(session, name, new_version)
            record = adapters.store(
                control, session, folder, info, name,
                tenant=control.principal.tenant, origin="merged", parents=named, base=base,
            )  # fmt: skip
            session.flush()
            return adapters.view(session, record)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def export(control: Control, name: str, version: int | None) -> schemas.Operation:
    """Begin to write the adapter's base model with a version of it merged into that; the operation tells how far it is,
    and its file is kept for a day."""
    with control.store.read() as session:
        row = adapters.require_version(adapters.require(session, name), version)
        engine = engines.known(session)
        base = _base_of([row], engine)
        model = bases.folder(session, control.settings, base)
    if model is None:
        raise Unavailable(
            "no_model", "the merged model needs the served one, and no engine has been here yet; start it", "model"
        )
    operation_id = new_id("merge")
    operations.begin(control, "merge", f"{row.name}@{row.version}", operation_id)
    arguments = (control, row.name, row.version, model, operation_id)
    threading.Thread(target=_export, args=arguments, name=f"harli-{operation_id}", daemon=True).start()
    return operations.get(control, operation_id)


def _base_of(rows: Sequence[AdapterVersionRecord], engine: EngineRecord | None) -> str | None:
    """The base model that all of these versions belong to; None for the served one. Raises Invalid for those of
    several, and of one that is not there any more."""
    first, *others = (row.base if not bases.fits(engine, row, None) else None for row in rows)
    for row, base in zip(rows[1:], others, strict=True):
        if base != first:
            raise Invalid(
                "base_differs",
                f"{rows[0].name}@{rows[0].version} belongs to base model {rows[0].base} and {row.name}@{row.version} "
                f"to {row.base}; give adapters of one base",
                "parts",
            )
    if first is not None and bases.of(engine, first) is None:
        raise Invalid(
            "base_model",
            f"adapter {rows[0].name}@{rows[0].version} belongs to base model {first}, which is not there; start the "
            "engine with it in HARLI_FINETUNE__BASE_MODELS",
            "version",
        )
    return first


def _export(control: Control, name: str, version: int, model: Path, operation_id: str) -> None:
    work = Work(control, operation_id, f"the merge of {name}@{version}")
    folder = operations.folder(control, operation_id) / f"{model.name}-{name}-{version}"
    try:
        with operations.ending(control, work), _one:
            intake.into_base(control.adapter_folder(name, version), model, folder, progress=work.progress)
            work.result = f"{folder.name}.tar"
    except HarliError as error:
        logger.info("merging %s@%d ended early: %s", name, version, error.message)
    except Exception:
        return  # the operation's end has told of it


def archive(control: Control, operation_id: str) -> tuple[Iterator[bytes], int, str]:
    """A merged model as a tar, made while it is read: (its bytes, how many, a name for it)."""
    found = operations.get(control, operation_id)
    if found.kind != "merge" or found.state != "succeeded" or found.result is None:
        raise Conflict(
            "nothing_to_download",
            f"operation {operation_id} ({found.kind}) is {found.state}; only a merge that succeeded has a file",
            "operation",
        )
    folder = operations.folder(control, operation_id) / found.result.removesuffix(".tar")
    members = sorted(folder.iterdir()) if folder.is_dir() else []
    if not members:
        raise NotFound("export_gone", f"the files of operation {operation_id} are gone; merge it again", "operation")
    size = sum(_BLOCK + -(-path.stat().st_size // _BLOCK) * _BLOCK for path in members) + 2 * _BLOCK
    return _tar(folder.name, members), size, found.result


def _tar(title: str, members: Sequence[Path]) -> Iterator[bytes]:
    for path in members:
        info = tarfile.TarInfo(f"{title}/{path.name}")
        info.size, info.mtime = path.stat().st_size, int(path.stat().st_mtime)
        yield info.tobuf(tarfile.GNU_FORMAT)
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                yield data
        yield b"\0" * (-info.size % _BLOCK)
    yield b"\0" * 2 * _BLOCK
