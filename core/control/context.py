"""What every service behind the API works with: settings, store, where files lie, the engine's last minutes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from core.config import Settings
from core.control.principal import Principal, itself
from core.telemetry.prometheus import Totals
from core.telemetry.window import Window
from db.audit import Actor
from db.store import Store


@dataclass(frozen=True)
class Control:
    """One per API process, which sees all; for a request `of` its principal, which sees its tenant's. `window` and
    `totals` fill only in the process that holds the engine link."""

    settings: Settings
    store: Store
    window: Window = field(default_factory=Window)
    totals: Totals = field(default_factory=Totals)
    principal: Principal = field(default_factory=itself)

    def of(self, principal: Principal, actor: Actor | None = None) -> Control:
        """The same, as the principal may see it: every query of its `store` is kept to the tenant. What is changed is
        written to the audit log as `actor`'s."""
        return replace(self, store=self.store.within(principal.scope, actor), principal=principal)

    # ---- where files lie ---------------------------------------------------------------------------------------------

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir.expanduser().absolute()

    @property
    def uploads(self) -> Path:
        """For what is not whole yet; nothing in it outlives a request."""
        return self.data_dir / "uploads"

    def dataset_file(self, dataset_id: str) -> Path:
        return self.data_dir / "datasets" / f"{dataset_id}.parquet"

    def adapter_folder(self, name: str, version: int) -> Path:
        return self.data_dir / "adapters" / name / str(version)

    def job_folder(self, job_id: str) -> Path:
        return self.data_dir / "jobs" / job_id


def open_control(settings: Settings) -> Control:
    """Open (and migrate) the store, make the data directory's folders."""
    control = Control(settings, Store(settings.resolved_database_url))
    for folder in ("datasets", "adapters", "exports", "jobs", "uploads", "run"):
        (control.data_dir / folder).mkdir(parents=True, exist_ok=True)
    return control


def new_id(prefix: str) -> str:
    """Unguessable and short enough to type: ``job-3f9a1c2b4d5e``."""
    return f"{prefix}-{secrets.token_hex(6)}"
