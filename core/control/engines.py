"""The engine as it last reported itself."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.orm import Session

from core.api import schemas
from core.config import Settings
from db import engines
from db import jobs as job_rows
from db.engines import EngineRecord

_STATES = {"ready": "ready", "lost": "lost", "gone": "absent"}


def view(session: Session) -> schemas.Engine:
    """Of the current engine; ``absent`` when none has said hello, or the last one has said goodbye."""
    record = engines.current(session)
    if record is None or record.state == "gone":
        return schemas.Engine(state="absent")
    hello = record.hello
    held = [job.id for job in job_rows.in_states(session, job_rows.IN_ENGINE) if job.engine_id == record.id]
    return schemas.Engine.model_validate(
        {
            **{name: hello[name] for name in schemas.Engine.model_fields if name in hello},
            "state": _STATES[record.state],
            "id": record.id,
            "running_job": held[0] if held else None,
            "since": record.since,
            "notices": record.notices,
        }
    )


def known(session: Session) -> EngineRecord | None:
    """The current engine or, while there is none, the last one: what it can serve is what the next one will."""
    return engines.current(session)


def model_path(session: Session, settings: Settings) -> Path | None:
    """Where the served model lies: where the last engine had it, else where the next one will. None when there is
    nothing yet (the bundled model is made at the first start)."""
    record = engines.current(session)
    candidates = [Path(record.hello["model_path"])] if record is not None else []
    candidates.append(settings.model_folder)
    return next((path for path in candidates if path.is_dir()), None)
