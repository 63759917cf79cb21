"""Adapters: uploads, versions, what the engine is to serve. The deployer makes the engine serve it."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sqlalchemy.orm import Session

from core.api import schemas
from core.control import bases, engines, pages
from core.control.context import Control, new_id
from core.errors import Conflict, Invalid, NotFound
from core.intake import adapter as intake
from db import adapters as rows
from db import changes
from db import datasets as dataset_rows
from db import jobs as job_rows
from db.adapters import AdapterAliasRecord, AdapterRecord, AdapterVersionRecord
from db.base import now

# ---- looking ---------------------------------------------------------------------------------------------------------


def get(control: Control, name: str) -> schemas.Adapter:
    with control.store.read() as session:
        return view(session, require(session, name))


def page(control: Control, limit: int, cursor: str | None) -> schemas.Page[schemas.Adapter]:
    after = pages.key(cursor, str)
    with control.store.read() as session:
        found = rows.page(session, limit + 1, after)
        following = pages.cursor(found[limit - 1].name) if len(found) > limit else None
        return schemas.Page(items=views(session, found[:limit]), next=following)


def view(session: Session, record: AdapterRecord) -> schemas.Adapter:
    return views(session, [record])[0]


def views(session: Session, records: Sequence[AdapterRecord]) -> list[schemas.Adapter]:
    """With their aliases, and the names of the data sets that their versions were trained on."""
    aliases = rows.aliases(session, [record.name for record in records])
    read = {row.dataset_id for record in records for row in record.versions if row.dataset_id is not None}
    trained_on = {found.id: f"{found.name}@{found.version}" for found in dataset_rows.by_ids(session, read)}
    shown = []
    for record in records:
        adapter = schemas.Adapter.model_validate(record, from_attributes=True)
        for version in adapter.versions:
            version.dataset = trained_on.get(version.dataset_id or "")
        adapter.aliases = [
            schemas.AdapterAlias.model_validate(alias, from_attributes=True)
            for alias in aliases
            if alias.name == record.name
        ]
        shown.append(adapter)
    return shown


def check_name(control: Control, name: str) -> schemas.NameCheck:
    with control.store.read() as session:
        reason = _name_reason(session, name)
    return schemas.NameCheck(name=name, available=reason is None, reason=reason)


def _name_reason(session: Session, name: str) -> str | None:
    """Why a new adapter cannot be called that."""
    engine = engines.known(session)
    if engine is not None and engine.hello["model"] == name:
        return f"{name} is the served model's own name; give the adapter another"
    if rows.taken(session, name):
        return f"the name {name} is taken: the engine serves every tenant, so a name is one tenant's only; give another"
    if rows.find(session, name) is not None:
        return f"there is an adapter {name} already; give another name, or upload it as a new version"
    return None


def require(session: Session, name: str) -> AdapterRecord:
    record = rows.find(session, name)
    if record is None:
        raise NotFound(
            "adapter_not_found", f"there is no adapter {name}; `harli adapters` lists those there are", "name"
        )
    return record


def require_version(record: AdapterRecord, version: int | None) -> AdapterVersionRecord:
    row = rows.version_of(record, version)
    if row is None:
        there = ", ".join(str(row.version) for row in record.versions) or "none"
        raise NotFound(
            "adapter_version_not_found",
            f"adapter {record.name} has no version {version}; there are: {there}",
            "version",
        )
    return row


# ---- storing ---------------------------------------------------------------------------------------------------------


def require_name(control: Control, name: str, new_version: bool) -> None:
    """Raise Conflict when an upload under this name cannot be stored; to be asked before its body is read."""
    with control.store.read() as session:
        require_name_in(session, name, new_version)


def require_name_in(session: Session, name: str, new_version: bool) -> None:
    reason = _name_reason(session, name)
    if reason is not None and not (new_version and rows.find(session, name) is not None):
        raise Conflict("name_taken", reason, "name")


def upload(
    control: Control, source: Path, name: str, new_version: bool, filename: str | None = None
) -> schemas.Adapter:
    """Check an uploaded adapter (folder, zip or tar) and store it as the name's next version. `filename`: under which
    it came."""
    limit = control.settings.max_upload_mib * 2**20
    with unpacked(control, source, max_bytes=limit, title=filename) as (folder, info):
        check(control, info, folder)
        with control.store.write() as session:
            require_name_in(session, name, new_version)
            record = store(control, session, folder, info, name, tenant=control.principal.tenant, origin="imported")
            session.flush()
            return view(session, record)


def store(
    control: Control,
    session: Session,
    folder: Path,
    info: intake.AdapterInfo,
    name: str,
    *,
    tenant: str,
    origin: str,
    job_id: str | None = None,
    dataset_id: str | None = None,
    parents: Sequence[str] = (),
    base: str | None = None,
) -> AdapterRecord:
    """Move a checked folder into its place as the name's next version, in the caller's write transaction: should that
    fail, no row names the folder, and the next one that gets this number replaces it. base: the model that it belongs
    to where that is not the served one."""
    record = rows.claim(session, name, now(), tenant)
    record.last_version += 1
    record.versions.append(
        AdapterVersionRecord(
            name=name,
            version=record.last_version,
            created_at=now(),
            origin=origin,
            job_id=job_id,
            dataset_id=dataset_id,
            rank=info.rank,
            alpha=info.alpha,
            target_modules=list(info.target_modules),
            bytes=info.bytes,
            sha256=info.sha256,
            # What was checked against a served model belongs to it, whatever it was called elsewhere.
            base=base or (engine.hello["model"] if (engine := engines.known(session)) is not None else info.base_model),
            parents=list(parents) or None,
        )
    )
    place = control.adapter_folder(name, record.last_version)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(place)
    changes.add(session, "adapters", origin, name, tenant=record.tenant, version=record.last_version)
    return record


@contextlib.contextmanager
def unpacked(
    control: Control, source: Path, *, max_bytes: int, title: str | None = None
) -> Iterator[tuple[Path, intake.AdapterInfo]]:
    """The peft files of a folder or archive, checked, in a folder on the same disk as its later place (so that it can
    be moved there at once); gone after the block unless it was moved."""
    folder = control.uploads / new_id("adapter")
    try:
        yield folder, intake.unpack(source, folder, max_bytes=max_bytes, title=title)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(control: Control, info: intake.AdapterInfo, folder: Path, base: str | None = None) -> None:
    """Raise Invalid for what the engine (the present one, else the last) cannot serve; base: the model that it belongs
    to where that is not the served one."""
    with control.store.read() as session:
        record = engines.known(session)
        model = bases.folder(session, control.settings, base)
    named = (info.base_model or "").rpartition("/")[2]
    if base is None and record is not None and bases.of(record, named) is not None:
        raise Invalid(
            "adapter_base",
            f"The adapter was trained on {named}, and the engine serves {record.hello['model']}. Upload one that was "
            "trained on the served model.",
            "base_model_name_or_path",
        )
    intake.check(
        info,
        folder,
        max_rank=record.hello["max_lora_rank"] if record is not None else None,
        modules=record.hello["lora_modules"] if record is not None else None,
        model_path=model if model is not None and (model / "config.json").is_file() else None,
    )


# ---- serving ---------------------------------------------------------------------------------------------------------


def deploy(control: Control, name: str, version: int | None) -> schemas.Adapter:
    """Want a version (None: the newest) served under the name."""
    with control.store.write() as session:
        record = require(session, name)
        row = require_version(record, version)
        require_servable(session, row)
        want(session, record, row.version)
        return view(session, record)


def require_servable(session: Session, row: AdapterVersionRecord) -> None:
    """Raise Invalid when the engine cannot serve the version."""
    if (why := bases.unserved(engines.known(session), row)) is not None:
        raise why
    engine = engines.view(session)
    if engine.max_lora_rank is not None and row.rank > engine.max_lora_rank:
        raise Invalid(
            "rank_too_large",
            f"adapter {row.name}@{row.version} has rank {row.rank} and the engine serves ranks up to "
            f"{engine.max_lora_rank}; start the engine with a larger HARLI_ENGINE__MAX_LORA_RANK",
            "version",
        )


def undeploy(control: Control, name: str) -> schemas.Adapter:
    """Want no version served; the engine finishes the requests that use it first."""
    with control.store.write() as session:
        record = require(session, name)
        want(session, record, None)
        return view(session, record)


def want(session: Session, record: AdapterRecord | AdapterAliasRecord, version: int | None) -> None:
    """Say what the engine is to serve; clears an earlier failure, so that it is tried again. What it serves under the
    name already answers until the other version is loaded."""
    record.wanted_version = version
    record.error = None
    if version is not None:
        record.deployment = "deployed" if record.deployed_version == version else "loading"
    else:
        record.deployment = "unloading" if record.deployed_version is not None else "none"
    words = {"version": version, "address": record.address}
    changes.add(session, "adapters", "wanted", record.name, tenant=record.tenant, **words)


# ---- taking away -----------------------------------------------------------------------------------------------------


def delete(control: Control, name: str, version: int | None) -> None:
    """Delete a version, or (None) all. What the engine serves of it is undeployed."""
    with control.store.write() as session:
        record = require(session, name)
        doomed = record.versions if version is None else [require_version(record, version)]
        numbers = [row.version for row in doomed]
        user = job_rows.open_with_initial(session, name, version)
        if user is None and version is None:
            user = job_rows.open_with_output(session, name)
        if user is not None:
            raise Conflict(
                "adapter_in_use",
                f"job {user.id} ({user.state}) needs adapter {name}; stop the job or wait for its end, then delete it",
                "name",
            )
        for alias in rows.aliases(session, [name]):
            if version is None:
                let_go(session, alias)
            elif version in (alias.wanted_version, alias.deployed_version):
                raise Conflict(
                    "adapter_in_use",
                    f"{alias.address} stands for version {version}; promote another version, or delete the alias first",
                    "version",
                )
        if record.wanted_version in numbers or record.deployed_version in numbers:
            want(session, record, None)
        record.versions = [row for row in record.versions if row.version not in numbers]
        if not record.versions:
            let_go(session, record)
        changes.add(session, "adapters", "deleted", name, tenant=record.tenant, version=version)
    for number in numbers:
        shutil.rmtree(control.adapter_folder(name, number), ignore_errors=True)


def let_go(session: Session, record: AdapterRecord | AdapterAliasRecord) -> None:
    """Take a name away: at once, or as soon as the engine no longer serves it."""
    record.deleted = True
    if record.deployed_version is None:
        session.flush()
        rows.remove(session, record)
    else:
        want(session, record, None)


def archive(control: Control, name: str, version: int | None) -> tuple[Path, str]:
    """A zip of a version's peft folder: (a temporary file that the caller deletes, the name to give it)."""
    with control.store.read() as session:
        row = require_version(require(session, name), version)
    folder = control.adapter_folder(name, row.version)
    path = control.uploads / f"{new_id('download')}.zip"
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for member in sorted(folder.iterdir()):
                archive.write(member, member.name)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path, f"{name}-{row.version}.zip"
