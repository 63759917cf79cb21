"""Alerts: pending, firing, resolved; what rules look at; who is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sqlalchemy import select

from core.api import schemas
from core.control import alerts, owner
from core.control.context import Control
from core.control.elapsed import Elapsed
from core.errors import NotFound
from core.telemetry import interval as iv
from core.telemetry.window import Window
from db.alerts import AlertRecord, AlertRuleRecord
from db.base import now
from db.webhooks import DeliveryRecord, WebhookRecord
from tests.control.peer import EnginePeer
from tests.stack import until
from tests.telemetry.test_interval import message

# What is no different on the two databases is tried with one.
either = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)


def rule(**fields: object) -> AlertRuleRecord:
    base = {"name": "slow", "metric": "itl_p99_ms", "comparison": "above", "threshold": 40.0, "for_s": 60.0}
    return AlertRuleRecord(**{**base, "window_s": 60.0, "severity": "warning", "enabled": True, **fields})


def opened(state: str) -> AlertRecord:
    return AlertRecord(rule="slow", severity="warning", state=state, message="", began_at=now())


@pytest.mark.parametrize(
    ("record", "held_s", "step"),
    [
        (None, None, None),
        (None, 0.0, "pending"),
        (None, 60.0, "firing"),
        (opened("pending"), None, "dropped"),
        (opened("pending"), 59.0, None),
        (opened("pending"), 60.0, "firing"),
        (opened("firing"), 999.0, None),
        (opened("firing"), 0.0, None),
        (opened("firing"), None, "resolved"),
    ],
)
def test_states_follow_how_long_the_rule_has_held(
    record: AlertRecord | None, held_s: float | None, step: str | None
) -> None:
    assert alerts.next_step(rule(), record, held_s) == step


def test_a_rule_that_waits_for_nothing_fires_at_once() -> None:
    assert alerts.next_step(rule(for_s=0.0), None, 0.0) == "firing"


def test_a_rule_that_is_gone_ends_its_alert() -> None:
    assert alerts.next_step(None, opened("firing"), None) == "resolved"
    assert alerts.next_step(None, opened("pending"), None) == "dropped"


def look(control: Control, at: datetime, held: Elapsed[str] | None = None) -> list[schemas.Alert]:
    alerts.evaluate(control, control.store.write, at, held or Elapsed())
    return alerts.page(control, 10, None, None).items


def only(control: Control, name: str, **fields: object) -> None:
    """This rule and no other."""
    for known in alerts.rules(control):
        alerts.delete_rule(control, known.name)
    alerts.put_rule(control, name, schemas.AlertRuleBody.model_validate(fields))


@pytest.mark.parametrize("by", [timedelta(), timedelta(hours=-1), timedelta(hours=1)])
def test_an_alert_from_its_beginning_to_its_end_whatever_the_clock_is_set_to(control: Control, by: timedelta) -> None:
    seconds = 0.0
    control = replace(control, window=Window(lambda: seconds))
    held: Elapsed[str] = Elapsed(lambda: seconds)
    only(control, "slow", metric="itl_p99_ms", comparison="above", threshold=40, for_s=30, severity="critical")
    time_ = now()

    def gaps(ms: float, at: datetime) -> None:
        control.window.add(iv.of_message(message(time=at.timestamp(), itl=[(ms, 10)]), {}))

    gaps(50.0, time_)
    assert [alert.state for alert in look(control, time_, held)] == ["pending"]
    seconds = 29.0
    assert [alert.state for alert in look(control, time_ + by + timedelta(seconds=29), held)] == ["pending"]
    seconds = 31.0
    later = time_ + by + timedelta(seconds=31)
    gaps(61.2, later)
    (fired,) = look(control, later, held)
    assert (fired.state, fired.severity, fired.fired_at) == ("firing", "critical", later)
    assert fired.message == "the p99 ITL is 61.2 ms, above 40 ms"
    assert look(control, later, held) == [fired], "nothing changes, nothing is written"
    seconds = 121.0
    much_later = later + timedelta(seconds=90)
    gaps(20.0, much_later)
    (ended,) = look(control, much_later, held)
    assert (ended.state, ended.resolved_at) == ("resolved", much_later)
    gaps(80.0, much_later)
    assert [alert.state for alert in look(control, much_later, held)] == ["pending", "resolved"], "a new one"


def test_a_rule_that_is_off_or_on_the_right_side_holds_not(control: Control) -> None:
    control.window.add(iv.of_message(message(time=now().timestamp(), itl=[(40.0, 10)]), {}))
    for comparison, enabled in (("above", True), ("below", True), ("above", False)):
        threshold = 40 if enabled else 30
        only(control, "slow", metric="itl_p99_ms", comparison=comparison, threshold=threshold, for_s=0, enabled=enabled)
        assert look(control, now()) == []
    only(control, "fast", metric="itl_p99_ms", comparison="below", threshold=41, for_s=0)
    assert [alert.state for alert in look(control, now())] == ["firing"]


@either
def test_a_missing_engine_and_a_long_wait_are_seen(control: Control, submit: Callable[..., schemas.Job]) -> None:
    for name, figure, comparison, limit in (
        ("engine-down", "engine_ready", "below", 1), ("waiting-jobs", "longest_wait_s", "above", 3600),
        ("queue", "queued_jobs", "above", 0), ("stalled", "finetune_tokens_s", "below", 1),
        ("parts", "parts_down", "above", 0),
    ):  # fmt: skip
        fields = {"metric": figure, "comparison": comparison, "threshold": limit, "for_s": 0}
        alerts.put_rule(control, name, schemas.AlertRuleBody.model_validate(fields))
    submit()
    (control.data_dir / "run" / "parts.json").write_text(
        '[{"name": "demo", "state": "backing_off", "since": "2026-11-30T12:00:00Z"}]'
    )
    found = {alert.rule for alert in look(control, now() + timedelta(hours=2))}
    assert found == {"engine-down", "waiting-jobs", "queue", "parts"}, "no job runs, so that none can stall"


@either
def test_an_engine_that_starts_for_the_first_time_is_not_down(control: Control) -> None:
    only(control, "down", metric="engine_ready", comparison="below", threshold=1, for_s=0)
    parts = control.data_dir / "run" / "parts.json"
    part = {"name": "engine", "state": "starting", "restarts": 0, "since": "2026-11-30T12:00:00Z"}
    parts.write_text(json.dumps([part]))
    assert look(control, now()) == []
    parts.write_text(json.dumps([{**part, "restarts": 1}]))
    assert [alert.state for alert in look(control, now())] == ["firing"], "it crashed before"


@either
def test_the_first_rules_are_there_and_stay_away_when_deleted(control: Control) -> None:
    assert [known.name for known in alerts.rules(control)] == ["attainment", "engine-down", "waiting-jobs"]
    alerts.delete_rule(control, "waiting-jobs")
    with pytest.raises(NotFound, match="no alert rule waiting-jobs; there are: attainment, engine-down"):
        alerts.delete_rule(control, "waiting-jobs")


@either
def test_webhooks_of_the_platform_hear_of_an_alert_and_its_end(control: Control) -> None:
    with control.store.write() as session:
        wanted = (("all", "default", []), ("jobs", "default", ["job.failed"]), ("theirs", "acme", []))
        for name, tenant, events in wanted:
            session.add(
                WebhookRecord(
                    id=name, tenant=tenant, url="https://a.example", secret="s", events=events, created_at=now()
                )
            )
    only(control, "down", metric="engine_ready", comparison="below", threshold=1, for_s=0)
    time_ = now()
    look(control, time_)
    alerts.delete_rule(control, "down")
    look(control, time_ + timedelta(seconds=5))
    with control.store.read() as session:
        found = session.scalars(select(DeliveryRecord).order_by(DeliveryRecord.id))
        sent = [(one.webhook_id, one.event, one.payload["data"]["alert"]["rule"]) for one in found]
    assert sent == [("all", "alert.firing", "down"), ("all", "alert.resolved", "down")]


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_ALERTS_S", 0.1)


@either
@pytest.mark.usefixtures("looks_often")
def test_the_owner_looks_by_itself(control: Control, engine: EnginePeer) -> None:
    only(control, "slow", metric="itl_p99_ms", comparison="above", threshold=40, for_s=0)
    engine.telemetry(itl=[(90.0, 5)], decode_tokens=5, time=time.time())
    until(lambda: [a for a in alerts.page(control, 10, None, "firing").items if a.rule == "slow"], 30, "the alert")
