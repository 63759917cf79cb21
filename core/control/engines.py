"""The engine as it last reported itself."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from core.api import schemas
from core.config import Settings
from core.control import notices
from core.control.context import Control
from db import engines
from db import jobs as job_rows
from db import notices as notice_rows
from db.engines import EngineRecord

_NOTICES = 20
_SECRET = re.compile("secret|password|token$|key$")
_STATES = {"ready": "ready", "lost": "lost", "gone": "absent"}


def view(session: Session) -> schemas.Engine:
    """Of the current engine; ``absent`` when none has said hello, or the last one has said goodbye."""
    record = engines.current(session)
    if record is None or record.state == "gone":
        return schemas.Engine(state="absent")
    hello = record.hello
    told = notice_rows.last(session, _NOTICES, engine_id=record.id)
    held = [job.id for job in job_rows.in_states(session, job_rows.IN_ENGINE) if job.engine_id == record.id]
    return schemas.Engine.model_validate(
        {
            **{name: hello[name] for name in schemas.Engine.model_fields if name in hello},
            "state": _STATES[record.state],
            "id": record.id,
            "running_job": held[0] if held else None,
            "since": record.since,
            "notices": [notices.view(row) for row in reversed(told)],
        }
    )


def in_words(control: Control) -> dict[str, str]:
    """The settings of this process by name, as people write them in harli.toml; a database's password is left out.
    Raises Forbidden for those of another tenant than the platform's."""
    control.principal.require_platform("viewer")
    plain = control.settings.model_dump()
    if control.settings.database_url is not None:
        plain["database_url"] = make_url(control.settings.database_url).render_as_string(hide_password=True)
    flat: dict[str, str] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": str(one) for inner, one in value.items()}
        else:
            flat[name] = str(value)
    return {name: "(set)" if _SECRET.search(name) and value != "None" else value for name, value in flat.items()}


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
