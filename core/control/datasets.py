"""Data sets: uploads, versions, previews, deletion."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.orm import Session

from core.api import schemas
from core.control import engines, pages
from core.control.context import Control, new_id
from core.control.operations import Work
from core.errors import Conflict, NotFound, Unavailable
from core.intake import dataset as intake
from core.intake import packing, preview, tokenizer
from core.intake import rows as parquet
from core.intake.tokenizer import Tokenizer
from db import changes
from db import datasets as rows
from db import jobs as job_rows
from db.base import now
from db.datasets import DatasetRecord

# ---- looking ---------------------------------------------------------------------------------------------------------


def get(control: Control, name_or_id: str) -> schemas.Dataset:
    with control.store.read() as session:
        return view(_require(session, name_or_id))


def page(control: Control, limit: int, cursor: str | None) -> schemas.Page[schemas.Dataset]:
    before = pages.key(cursor, int)
    with control.store.read() as session:
        found = rows.page(session, limit + 1, before)
        following = pages.cursor(found[limit - 1].seq) if len(found) > limit else None
        return schemas.Page(items=[view(record) for record in found[:limit]], next=following)


def view(record: DatasetRecord) -> schemas.Dataset:
    return schemas.Dataset.model_validate(record, from_attributes=True)


def read_rows(control: Control, name_or_id: str, offset: int, limit: int) -> list[schemas.DatasetRow]:
    return parquet.read(file(control, name_or_id), offset, limit)


def rendered(control: Control, name_or_id: str, offset: int, limit: int) -> list[schemas.RenderedRow]:
    """Rows as the served model's chat template writes them, with the loss mask."""
    with control.store.read() as session:
        record = _require(session, name_or_id)
        model = _model(control, session)
    return packing.rendered(control.dataset_file(record.id), tokenizer.load(model), offset, limit)


def _model(control: Control, session: Session) -> Path:
    model = engines.model_path(session, control.settings)
    if model is None:
        raise Unavailable(
            "no_tokenizer",
            "this needs the served model's tokenizer, and no engine has been here yet; try again once the engine is "
            "ready",
        )
    return model


def packed(
    control: Control, name_or_id: str, micro_batch_tokens: int | None, sequence_length: int | None, seed: int
) -> schemas.PackedPreview:
    """The first micro-batch of a job with these settings (None: the defaults that a job has)."""
    with control.store.read() as session:
        record = _require(session, name_or_id)
        model = _model(control, session)
    tokens = micro_batch_tokens or control.settings.finetune.micro_batch_tokens
    return packing.preview(
        control.dataset_file(record.id),
        tokenizer.load(model),
        micro_batch_tokens=tokens,
        sequence_length=sequence_length or tokens,
        seed=seed,
    )


def file(control: Control, name_or_id: str) -> Path:
    """The normalised Parquet."""
    with control.store.read() as session:
        return control.dataset_file(_require(session, name_or_id).id)


def _require(session: Session, name_or_id: str) -> DatasetRecord:
    record = rows.find(session, name_or_id)
    if record is None:
        raise NotFound(
            "dataset_not_found", f"there is no data set {name_or_id}; `harli datasets` lists those there are", "dataset"
        )
    return record


def look(
    control: Control, path: Path, filename: str, columns: dict[str, str] | None, *, partial: bool
) -> schemas.DatasetPreview:
    """How a file would be read, before it is uploaded, and what of its first rows would be refused."""
    return preview.look(path, filename, columns, tokenizer=_tokenizer(control), partial=partial)


def _tokenizer(control: Control) -> Tokenizer | None:
    """That of the served model, whose chat template rows are held against; None while there is none to serve."""
    with control.store.read() as session:
        model = engines.model_path(session, control.settings)
    return tokenizer.load(model) if model is not None else None


# ---- storing ---------------------------------------------------------------------------------------------------------


def check_name(control: Control, name: str) -> schemas.NameCheck:
    with control.store.read() as session:
        reason = _name_reason(session, name)
    return schemas.NameCheck(name=name, available=reason is None, reason=reason)


def require_name(control: Control, name: str, new_version: bool) -> None:
    """Raise Conflict when an upload under this name cannot be stored; to be asked before its body is read."""
    with control.store.read() as session:
        _require_name(session, name, new_version)


def _name_reason(session: Session, name: str) -> str | None:
    if not rows.last_version(session, name):
        return None
    return f"there is a data set {name} already; give another name, or upload it as a new version"


def _require_name(session: Session, name: str, new_version: bool) -> None:
    reason = _name_reason(session, name)
    if reason is not None and not new_version:
        raise Conflict("name_taken", reason, "name")


def store(
    control: Control,
    source: Path,
    filename: str,
    sha256: str,
    name: str,
    columns: dict[str, str] | None,
    new_version: bool,
    work: Work | None = None,
) -> tuple[schemas.Dataset, bool]:
    """Check an uploaded file and store it, normalised, as the name's next version; (the data set, whether it is new).
    Rows that a version of the name has already make no new one. `work` is told of progress, and may end it.

    Raises Invalid (with the validator's report) when it cannot be trained on; nothing is left of it then.
    """
    tokens = _tokenizer(control)
    dataset_id = new_id("ds")
    place = control.dataset_file(dataset_id)
    try:
        report = intake.ingest(
            source,
            place,
            filename=filename,
            tokenizer=tokens,
            columns=columns,
            usual_tokens=control.settings.finetune.micro_batch_tokens,
            progress=work.progress if work is not None else None,
        )
        with control.store.write() as session:
            _require_name(session, name, new_version)
            same = rows.with_content(session, name, report.content_sha256 or "")
            # Rows of another model's tokens are worth a version: a job reads those that are stored.
            if same is not None and same.tokenizer == (tokens.fingerprint if tokens is not None else None):
                place.unlink()
                return view(same), False
            record = DatasetRecord(
                id=dataset_id,
                tenant=control.principal.tenant,
                name=name,
                version=rows.last_version(session, name) + 1,
                created_at=now(),
                bytes=source.stat().st_size,
                sha256=sha256,
                content_sha256=report.content_sha256,
                tokenizer=tokens.fingerprint if tokens is not None else None,
                report=report.model_dump(mode="json"),
            )
            session.add(record)
            words = {"name": name, "version": record.version}
            changes.add(session, "datasets", "uploaded", dataset_id, tenant=record.tenant, **words)
            session.flush()
            return view(record), True
    except BaseException:
        place.unlink(missing_ok=True)
        raise


# ---- taking away -----------------------------------------------------------------------------------------------------


def delete(control: Control, name_or_id: str) -> None:
    """By id: that version; by name: all of them."""
    with control.store.write() as session:
        record = _require(session, name_or_id)
        doomed = [record] if record.id == name_or_id else rows.versions(session, name_or_id)
        user = job_rows.open_with_dataset(session, [record.id for record in doomed])
        if user is not None:
            raise Conflict(
                "dataset_in_use",
                f"job {user.id} ({user.state}) reads data set {record.name}; stop the job or wait for its end, then "
                "delete it",
                "dataset",
            )
        for record in doomed:
            session.delete(record)
            words = {"name": record.name, "version": record.version}
            changes.add(session, "datasets", "deleted", record.id, tenant=record.tenant, **words)
    for record in doomed:
        control.dataset_file(record.id).unlink(missing_ok=True)
