"""Files in OpenAI's sense: a data set's version under its id, and the figures of a job as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from core.api import schemas
from core.api.names import name_of
from core.api.openai_schemas import Deleted, File, Listed, listed
from core.control import datasets, jobs
from core.control.context import Control
from core.control.operations import Work
from core.errors import Invalid, NotFound
from core.intake import rows as parquet
from db import datasets as dataset_rows
from db import openai as rows

RESULTS = "results-"
_PAGE = 500
_FIGURES = ("step", "loss", "eval_loss", "learning_rate", "tokens")
_HEADINGS = ("step", "train_loss", "valid_loss", "learning_rate", "trained_tokens")


def create(control: Control, path: Path, filename: str, sha256: str, purpose: str | None, work: Work) -> File:
    """Check and store an upload as a data set of the file's name; a file of a name that is there already is its next
    version. `work` may end it. Raises Invalid for another purpose, or for what is
    in the file."""
    if purpose != "fine-tune":
        raise Invalid(
            "purpose", f"purpose is {purpose!r}; Harli takes files with the purpose fine-tune, in that field", "purpose"
        )
    found, _ = datasets.store(control, path, filename, sha256, name_of(filename), None, True, work)
    return view(found)


def view(dataset: schemas.Dataset) -> File:
    remarks = [f"{finding.count} × {finding.message}" for finding in dataset.report.findings]
    return File(
        id=dataset.id,
        bytes=dataset.bytes,
        created_at=int(dataset.created_at.timestamp()),
        filename=f"{dataset.name}.jsonl",
        purpose="fine-tune",
        status_details="; ".join(remarks) or None,
    )


def get(control: Control, file_id: str) -> File:
    if file_id.startswith(RESULTS):
        return _results(control, file_id)
    try:
        return view(datasets.get(control, file_id))
    except NotFound as error:
        raise _unknown(file_id) from error


def page(control: Control, limit: int, after: str | None, ascending: bool, purpose: str | None) -> Listed[File]:
    """Data sets by the time of their upload. The results of jobs are listed by the jobs."""
    if purpose not in (None, "fine-tune"):
        return listed([], False)
    limit = min(limit, _PAGE)
    with control.store.read() as session:
        seq = None
        if after is not None:
            last = dataset_rows.find(session, after)
            if last is None:
                raise NotFound("file_not_found", f"after is {after}; there is no such file", "after")
            seq = last.seq
        found = rows.files(session, limit + 1, seq, ascending)
        return listed([view(datasets.view(record)) for record in found[:limit]], len(found) > limit)


def content(control: Control, file_id: str) -> tuple[Iterator[bytes], str, str]:
    """(the bytes, their media type, a name for them): a data set as chats in JSON lines, results as CSV."""
    if file_id.startswith(RESULTS):
        return iter([_csv(control, _job_id(file_id))]), "text/csv", f"{file_id}.csv"
    found = datasets.get(control, get(control, file_id).id)
    path = datasets.file(control, found.id)
    parquet.count(path)  # raises, while it can still be answered, when the file is gone
    return _lines(path), "application/jsonl", f"{found.name}.jsonl"


def _lines(path: Path) -> Iterator[bytes]:
    for chats in parquet.chunks(path):
        bodies = ({"messages": row.messages} | ({"tools": row.tools} if row.tools else {}) for row in chats)
        lines = (json.dumps(body, ensure_ascii=False) for body in bodies)
        yield ("\n".join(lines) + "\n").encode()


def delete(control: Control, file_id: str) -> Deleted:
    found = get(control, file_id)
    if found.purpose != "fine-tune":
        raise Invalid("results", f"{file_id} is part of its job, and goes when the job does", "file_id")
    datasets.delete(control, found.id)
    return Deleted(id=found.id, object="file")


# ---- results ---------------------------------------------------------------------------------------------------------


def _job_id(file_id: str) -> str:
    return file_id.removeprefix(RESULTS)


def _results(control: Control, file_id: str) -> File:
    try:
        job = jobs.get(control, _job_id(file_id))
    except NotFound as error:
        raise _unknown(file_id) from error
    return File(
        id=file_id,
        bytes=len(_csv(control, job.id)),
        created_at=int((job.ended_at or job.created_at).timestamp()),
        filename=f"{file_id}.csv",
        purpose="fine-tune-results",
    )


def _csv(control: Control, job_id: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADINGS)
    for metric in jobs.metrics(control, job_id, -1, 1_000_000):
        writer.writerow([getattr(metric, name) for name in _FIGURES])
    return text.getvalue().encode()


def _unknown(file_id: str) -> NotFound:
    return NotFound(
        "file_not_found", f"there is no file {file_id}; client.files.list() shows those there are", "file_id"
    )
