"""Alerts: rules on the engine's figures, the queue and the parts, looked at every few seconds by the process that
dispatches. Webhooks hear of each alert that fires and of its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy.orm import Session

from core import alert_text
from core.api import schemas
from core.control import pages, telemetry, webhooks
from core.control.context import Control
from core.control.elapsed import Elapsed
from core.errors import NotFound
from core.telemetry.interval import point
from db import alerts as rows
from db import changes, engines
from db import jobs as job_rows
from db.alerts import AlertRecord, AlertRuleRecord
from db.base import now
from db.scope import DEFAULT_TENANT

Write = Callable[[], AbstractContextManager[Session]]
Step = Literal["pending", "firing", "resolved", "dropped"]
# Figures of the moment; the others are of what the engine has reported over a window.
_PRESENT = frozenset({"engine_ready", "parts_down", "queued_jobs", "longest_wait_s"})

# ---- rules -----------------------------------------------------------------------------------------------------------


def rules(control: Control) -> list[schemas.AlertRule]:
    """By name. Raises Forbidden as `put_rule` does."""
    control.principal.require_platform("viewer")
    with control.store.read() as session:
        return [_rule_view(record) for record in rows.rules(session)]


def put_rule(control: Control, name: str, body: schemas.AlertRuleBody) -> schemas.AlertRule:
    """Make a rule, or replace the one of that name. Raises Forbidden for tenants other than the platform's."""
    control.principal.require_platform("operator")
    with control.store.write() as session:
        record = session.get(AlertRuleRecord, name)
        if record is None:
            record = AlertRuleRecord(name=name)
            session.add(record)
        for field, value in body.model_dump().items():
            setattr(record, field, value)
        record.updated_at = now()
        changes.add(session, "alerts", "rule", name, tenant=DEFAULT_TENANT)
        return _rule_view(record)


def delete_rule(control: Control, name: str) -> None:
    """Raises NotFound, Forbidden. An alert of the rule that is open ends at the next look."""
    control.principal.require_platform("operator")
    with control.store.write() as session:
        record = session.get(AlertRuleRecord, name)
        if record is None:
            there = ", ".join(rule.name for rule in rows.rules(session)) or "none"
            raise NotFound("alert_rule_not_found", f"there is no alert rule {name}; there are: {there}", "name")
        session.delete(record)
        changes.add(session, "alerts", "rule_deleted", name, tenant=DEFAULT_TENANT)


def _rule_view(record: AlertRuleRecord) -> schemas.AlertRule:
    return schemas.AlertRule.model_validate(record, from_attributes=True)


# ---- alerts ----------------------------------------------------------------------------------------------------------


def page(control: Control, limit: int, cursor: str | None, state: str | None) -> schemas.Page[schemas.Alert]:
    """Newest first, of one state or all. Raises Forbidden as `put_rule` does."""
    control.principal.require_platform("viewer")
    before = pages.key(cursor, int)
    with control.store.read() as session:
        found = rows.page(session, limit + 1, before, (state,) if state else ())
    following = pages.cursor(found[limit - 1].id) if len(found) > limit else None
    return schemas.Page(items=[view(record) for record in found[:limit]], next=following)


def view(record: AlertRecord) -> schemas.Alert:
    return schemas.Alert.model_validate(record, from_attributes=True)


# ---- looking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What a rule's figure is made of."""

    control: Control
    session: Session
    at: datetime

    def value(self, rule: AlertRuleRecord) -> float | None:
        """The rule's figure now; None when there is none."""
        return self._present(rule.metric) if rule.metric in _PRESENT else self._measured(rule)

    def _present(self, metric: str) -> float | None:
        """A figure of the store or of the parts at this moment."""
        value: float | None = None
        match metric:
            case "engine_ready":
                engine = engines.current(self.session)
                if engine is not None and engine.state == "ready":
                    value = 1.0
                elif not self._starts():
                    value = 0.0
            case "parts_down":
                value = float(sum(part.state in ("backing_off", "failed") for part in telemetry.parts(self.control)))
            case "queued_jobs":
                value = float(job_rows.counts(self.session).get("queued", 0))
            case "longest_wait_s":
                waiting = job_rows.in_states(self.session, ("queued",))
                since = min((job.state_since for job in waiting), default=self.at)
                value = (self.at - since).total_seconds()
        return value

    def _starts(self) -> bool:
        """Whether the engine is being started for the first time: that takes minutes, and is no fault."""
        parts = telemetry.parts(self.control)
        return any(part.name == "engine" and part.state == "starting" and not part.restarts for part in parts)

    def _measured(self, rule: AlertRuleRecord) -> float | None:
        """A figure of the engine's reports over the rule's window; None without reports."""
        interval = self.control.window.last(rule.window_s)
        if interval is None:
            return None
        if rule.metric == "finetune_tokens_s" and not job_rows.in_states(self.session, ("running",)):
            return None
        if rule.metric == "waiting_requests":
            return float(interval.waiting)
        if rule.metric == "kv_used_share":
            return interval.kv_used / interval.kv_total if interval.kv_total else None
        value: float | None = getattr(point(interval), rule.metric)
        return value


def evaluate(control: Control, write: Write, at: datetime, held: Elapsed[str]) -> None:
    """Look at every rule and move its alert on. `write` opens a write transaction that fails once the lease is lost;
    one is opened only when something changes. `held` is the caller's from one look to the next: for how long rules have
    held, by name."""
    with control.store.read() as session:
        look = Look(control, session, at)
        found = {rule.name: rule for rule in rows.rules(session)}
        values = {name: look.value(rule) for name, rule in found.items() if rule.enabled}
        opened = rows.open_ones(session)
    held_s = held.seconds(name for name, value in values.items() if _holds(found[name], value))
    due = {
        name: step
        for name in {*found, *opened}
        if (step := next_step(found.get(name), opened.get(name), held_s.get(name))) is not None
    }
    if not due:
        return
    with write() as session:
        opened = rows.open_ones(session)
        for name, step in sorted(due.items()):
            _apply(session, step, found.get(name), opened.get(name), values.get(name), at)


def next_step(rule: AlertRuleRecord | None, alert: AlertRecord | None, held_s: float | None) -> Step | None:
    """What becomes of a rule's open alert (None: it has none) now that the rule has held for so many seconds (None: it
    does not hold, is off, or is there no more)."""
    if alert is not None and alert.state == "firing":
        return "resolved" if held_s is None else None
    if held_s is None:
        return "dropped" if alert is not None else None
    assert rule is not None
    if held_s >= rule.for_s:
        return "firing"
    return "pending" if alert is None else None


def _holds(rule: AlertRuleRecord, value: float | None) -> bool:
    if value is None:
        return False
    return value > rule.threshold if rule.comparison == "above" else value < rule.threshold


def _apply(
    session: Session,
    step: Step,
    rule: AlertRuleRecord | None,
    alert: AlertRecord | None,
    value: float | None,
    at: datetime,
) -> None:
    if step == "dropped":
        if alert is not None:
            session.delete(alert)
            changes.add(session, "alerts", "dropped", alert.rule, tenant=DEFAULT_TENANT)
        return
    if alert is None:
        if rule is None:
            return
        alert = AlertRecord(rule=rule.name, severity=rule.severity, began_at=at)
        session.add(alert)
    alert.state, alert.value = step, value
    if step == "resolved":
        alert.resolved_at = at
        alert.message = f"{alert.message}; over since {at:%Y-%m-%d %H:%M:%S} UTC"
    else:
        assert rule is not None
        assert value is not None
        alert.message = alert_text.finding(_rule_view(rule), value)
        alert.severity = rule.severity
        if step == "firing":
            alert.fired_at = at
    session.flush()
    shown = view(alert).model_dump(mode="json")
    changes.add(session, "alerts", step, alert.rule, tenant=DEFAULT_TENANT, **shown)
    if step != "pending":
        webhooks.announce(session, DEFAULT_TENANT, f"alert.{step}", {"alert": shown})
