"""Old versions go by themselves where the settings say so: those that nobody serves, calls by an alias, trains on or
starts from, beyond the newest of a name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

from sqlalchemy.orm import Session

from core.control.context import Control
from db import adapters as adapter_rows
from db import changes
from db import datasets as dataset_rows
from db import jobs as job_rows
from db.adapters import AdapterRecord
from db.base import now

Write = Callable[[], AbstractContextManager[Session]]


def retire(control: Control, write: Write) -> None:
    """Delete what is beyond both limits of its kind: the number of versions and their age."""
    settings = control.settings.retention
    if settings.adapter_versions is not None:
        _adapters(control, write, settings.adapter_versions, timedelta(days=settings.days))
    if settings.dataset_versions is not None:
        _datasets(control, write, settings.dataset_versions, timedelta(days=settings.days))


def _adapters(control: Control, write: Write, kept: int, age: timedelta) -> None:
    doomed: list[tuple[str, int]] = []
    with write() as session:
        served = adapter_rows.everything(session)
        held = {(one.name, number) for one in served for number in (one.wanted_version, one.deployed_version)}
        for record in served:
            if not isinstance(record, AdapterRecord):
                continue
            for row in record.versions[:-kept]:
                young = row.created_at > now() - age
                key = (record.name, row.version)
                if young or key in held or job_rows.open_with_initial(session, *key) is not None:
                    continue
                doomed.append(key)
            gone = {number for name, number in doomed if name == record.name}
            if gone:
                record.versions = [row for row in record.versions if row.version not in gone]
                for number in gone:
                    changes.add(session, "adapters", "retired", record.name, tenant=record.tenant, version=number)
    for name, number in doomed:
        shutil.rmtree(control.adapter_folder(name, number), ignore_errors=True)


def _datasets(control: Control, write: Write, kept: int, age: timedelta) -> None:
    doomed = []
    with write() as session:
        for record in dataset_rows.older_than(session, kept, now() - age):
            if job_rows.open_with_dataset(session, [record.id]) is None:
                doomed.append(record.id)
                session.delete(record)
                words = {"name": record.name, "version": record.version}
                changes.add(session, "datasets", "retired", record.id, tenant=record.tenant, **words)
    for dataset_id in doomed:
        control.dataset_file(dataset_id).unlink(missing_ok=True)
