"""Making the engine serve the adapters that are wanted, over its own HTTP routes: each under its name, and what an
alias stands for under ``name@alias``.

What is wanted and what is served stand in the store; each call looks for a difference and takes one step. A version
that takes another one's place is loaded while that one still answers; the engine then lets requests go to the new one,
and the old one go when its requests have ended (`core.serving.exchange`). A refusal is kept as the adapter's error
until someone asks again; an engine that does not answer is asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
from sqlalchemy.orm import Session

from core.api import schemas
from core.control import bases
from core.control.context import Control
from db import adapters as rows
from db import changes, engines
from db.adapters import AdapterAliasRecord, AdapterRecord, AdapterVersionRecord

logger = logging.getLogger(__name__)

# Unloading waits until the requests that use the adapter have ended.
UNLOAD_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 120.0
# How SGLang says that it has no such adapter.
_ABSENT = ("does not exist", "not loaded")

Write = Callable[[], AbstractContextManager[Session]]
Record = AdapterRecord | AdapterAliasRecord


class Deployer:
    """`write` opens a write transaction that fails once the dispatch lease is lost."""

    def __init__(self, control: Control, write: Write) -> None:
        self._control = control
        self._write = write

    def run(self) -> None:
        """Bring every adapter one step nearer to what is wanted."""
        with self._control.store.read() as session:
            engine = engines.current(session)
            if engine is None or engine.state != "ready":
                return
            url = str(engine.hello["http_url"])
            pending = [record for record in rows.everything(session) if self._differs(record, engine.id)]
        if not pending:
            return
        with httpx.Client(base_url=url, timeout=LOAD_TIMEOUT_S, trust_env=False) as http:
            for record in pending:
                try:
                    self._step(http, engine.id, record)
                except httpx.TransportError as error:
                    logger.info("engine %s does not answer about adapter %s: %s", engine.id, record.address, error)
                    return

    @staticmethod
    def _differs(record: Record, engine_id: str) -> bool:
        if record.deployment == "failed":
            return False
        served = record.deployed_version if record.engine_id == engine_id else None
        return served != record.wanted_version or record.deleted

    def _step(self, http: httpx.Client, engine_id: str, record: Record) -> None:
        if record.wanted_version is not None and not record.deleted:
            self._load(http, engine_id, record, record.wanted_version)
        elif record.engine_id == engine_id and record.deployed_version is not None:
            self._unload(http, engine_id, record)
        else:
            self._note(engine_id, record, None, None)

    def _load(self, http: httpx.Client, engine_id: str, record: Record, version: int) -> None:
        row, why = self._version(record, version)
        if row is None:
            return
        if why is not None:
            self._note(engine_id, record, record.deployed_version if record.engine_id == engine_id else None, why)
            return
        body = {"lora_name": record.address, "lora_path": str(self._control.adapter_folder(record.name, version))}
        answer = http.post("/load_lora_adapter", json=body)
        named = f"{record.name}@{version}" + (f" as {record.address}" if record.address != record.name else "")
        if answer.is_error:
            served = record.deployed_version if record.engine_id == engine_id else None
            self._note(engine_id, record, served, self._refusal("load", named, answer))
        elif self._note(engine_id, record, version, None, loaded=row):
            logger.info("engine %s serves adapter %s", engine_id, named)
        else:
            # Deleted while it was loaded: nothing in the store says any more that the engine has it.
            self._unload(http, engine_id, record)

    def _version(self, record: Record, version: int) -> tuple[AdapterVersionRecord | None, schemas.ErrorDetail | None]:
        """The version, None once it is deleted; and why the engine, which may serve another model than the one before,
        cannot serve it."""
        with self._control.store.read() as session:
            row = _row(session, record, version)
            why = bases.unserved(engines.current(session), row) if row is not None else None
        return row, schemas.ErrorDetail(code=why.code, message=why.message, param=why.param) if why else None

    def _unload(self, http: httpx.Client, engine_id: str, old: Record) -> None:
        """Have the engine let go of what it serves under the name, which the store may not have any more."""
        address = old.address
        try:
            answer = http.post("/unload_lora_adapter", json={"lora_name": address}, timeout=UNLOAD_TIMEOUT_S)
        except httpx.ReadTimeout:
            # The engine goes on waiting for its requests; what it says the next time tells whether it is through.
            message = f"requests have used adapter {address} for {UNLOAD_TIMEOUT_S:g} s; the engine waits for their end"
            with self._write() as session:
                record = rows.again(session, old)
                if record is not None:
                    record.error = schemas.ErrorDetail(code="unload_waits", message=message).model_dump()
                changes.add(session, "adapters", "unloading", old.name, tenant=(record or old).tenant, message=message)
            return
        absent = any(words in answer.text for words in _ABSENT)
        if not answer.is_error or absent:
            self._note(engine_id, old, None, None)
            return
        refusal = self._refusal("unload", address, answer)
        logger.warning("engine %s: %s", engine_id, refusal.message)
        with self._write() as session:
            record = rows.again(session, old)
            # What is wanted under the name by now takes the place of what is there, unloaded or not.
            if record is not None and record.wanted_version is None:
                self._fail(session, record, refusal)

    def _note(
        self,
        engine_id: str,
        old: Record,
        version: int | None,
        error: schemas.ErrorDetail | None,
        loaded: AdapterVersionRecord | None = None,
    ) -> bool:
        """Write down what the engine serves under the name by now, and how that stands to what is wanted. False when
        there is nothing to write to: the name is gone, or the version that was `loaded` (a later one of its name and
        number is another)."""
        with self._write() as session:
            record = rows.again(session, old)
            if record is None:
                return False
            if loaded is not None:
                row = _row(session, record, loaded.version)
                if row is None or row.created_at != loaded.created_at:
                    return False
            record.engine_id, record.deployed_version, record.error = engine_id, version, None
            if error is not None and record.wanted_version is not None:
                self._fail(session, record, error)
                return True
            if record.deleted and version is None:
                rows.remove(session, record)
            elif record.wanted_version == version:
                record.deployment = "deployed" if version is not None else "none"
            else:
                record.deployment = "loading" if record.wanted_version is not None else "unloading"
            changes.add(
                session, "adapters", record.deployment, old.name,
                tenant=record.tenant, version=version, address=record.address,
            )  # fmt: skip
            return True

    @staticmethod
    def _fail(session: Session, record: Record, error: schemas.ErrorDetail) -> None:
        record.deployment = "failed"
        record.error = error.model_dump()
        changes.add(session, "adapters", "failed", record.name, tenant=record.tenant, message=error.message)

    @staticmethod
    def _refusal(what: str, name: str, answer: httpx.Response) -> schemas.ErrorDetail:
        try:
            body = answer.json()
            reason = body.get("error_message") or body.get("message") or answer.text
        except ValueError:
            reason = answer.text
        return schemas.ErrorDetail(code=f"{what}_refused", message=f"the engine did not {what} {name}: {reason[:500]}")


def _row(session: Session, record: Record, version: int) -> AdapterVersionRecord | None:
    adapter = rows.find(session, record.name)
    return rows.version_of(adapter, version) if adapter is not None else None
