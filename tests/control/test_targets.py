"""Targets: versions, the measured default, the tightest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from core.api import schemas
from core.api.tenant_schemas import TenantCreate
from core.control import adapters, dispatcher, notices, targets, tenants
from core.control.context import Control
from core.control.principal import SCOPES, Principal
from core.errors import Conflict, Invalid
from core.link.messages import SetTargets
from db import targets as rows
from db.base import now
from db.scope import DEFAULT_TENANT
from tests.control import files
from tests.control.peer import EnginePeer
from tests.stack import until

order = targets.order

ITL = {"kind": "itl", "ms": 45.0, "quantile": 0.99}


def update(version: int, *values: dict[str, object]) -> schemas.TargetsUpdate:
    return schemas.TargetsUpdate.model_validate({"version": version, "targets": list(values)})


def view(control: Control) -> schemas.Targets:
    with control.store.read() as session:
        return targets.view(session)


def propose(control: Control, solo_itl_ms: float | None) -> schemas.Targets:
    with control.store.write() as session:
        targets.propose(session, solo_itl_ms)
    return view(control)


def test_at_first_there_are_none(control: Control) -> None:
    assert (view(control).version, view(control).origin, view(control).targets) == (0, "none", [])


def test_setting_them_makes_the_next_version(control: Control) -> None:
    first = targets.put(control, update(0, ITL))
    second = targets.put(control, update(1, ITL, {"kind": "ttft", "ms": 500}))
    assert (first.version, second.version, second.origin) == (1, 2, "set")
    assert view(control) == second


def test_a_version_that_is_no_longer_in_force_is_refused_with_what_is(control: Control) -> None:
    targets.put(control, update(0, ITL))
    with pytest.raises(Conflict, match="version 1 by now, not 0; in force: ITL p99 ≤ 45 ms"):
        targets.put(control, update(0, {"kind": "itl", "ms": 30}))
    assert view(control).targets[0].ms == 45


def test_the_same_quantile_twice_is_refused(control: Control) -> None:
    with pytest.raises(Invalid, match=r"targets\.1"):
        targets.put(control, update(0, ITL, {"kind": "itl", "ms": 30}))
    assert view(control).version == 0


def test_the_default_is_three_times_the_solo_gap_to_two_digits(control: Control) -> None:
    proposed = propose(control, 13.37)
    assert (proposed.origin, proposed.version) == ("measured", 1)
    assert proposed.targets == [schemas.TargetBody(kind="itl", ms=41.0, quantile=0.99)]


@pytest.mark.parametrize(("solo_ms", "target_ms"), [(2.0, 6.0), (5.01, 16.0), (100.0, 300.0), (0.21, 0.63)])
def test_the_default_is_rounded_up_never_down(control: Control, solo_ms: float, target_ms: float) -> None:
    assert propose(control, solo_ms).targets[0].ms == target_ms


def test_another_engines_measurement_moves_the_default_only(control: Control) -> None:
    propose(control, 13.37)
    assert propose(control, 13.36).version == 1, "the same default is no change"
    assert propose(control, 20.0).version == 2
    targets.put(control, update(2, ITL))
    assert propose(control, 90.0).targets[0].ms == 45, "what someone set stays"


@pytest.mark.parametrize("solo_ms", [None, float("nan"), float("inf"), 0.0])
def test_without_a_measurement_there_is_no_default(control: Control, solo_ms: float | None) -> None:
    assert propose(control, solo_ms).origin == "none"


def test_the_tightest_itl_target_counts(control: Control) -> None:
    targets.put(control, update(0, ITL, {"kind": "itl", "ms": 20, "quantile": 0.5}, {"kind": "ttft", "ms": 1}))
    with control.store.read() as session:
        in_force = targets.in_force(rows.current(session), now())
    assert targets.tightest_itl_ms(in_force) == {None: 20}
    assert targets.tightest_itl_ms([]) == {}


def acme_and_rival(control: Control) -> None:
    admin = Principal("root", DEFAULT_TENANT, "admin", frozenset(SCOPES["admin"]))
    for name in ("acme", "rival"):
        tenants.create(control.of(admin), TenantCreate(name=name))


def test_a_tenant_that_does_not_exist_has_no_target(control: Control) -> None:
    before = targets.put(control, update(0, ITL))
    with pytest.raises(Invalid, match="no tenant acme") as caught:
        targets.put(control, update(1, ITL, {**ITL, "tenant": "acme"}))
    assert caught.value.param == "targets.1.tenant"
    assert view(control) == before


def test_a_tenants_and_a_weeks_targets_are_no_repetition(control: Control) -> None:
    acme_and_rival(control)
    weekly = {"windows": [{"days": ["mon"], "zone": "Europe/Berlin"}]}
    other_day = {**ITL, "ms": 9.0, "windows": [{"days": ["tue"]}]}
    stored = targets.put(control, update(0, ITL, {**ITL, "tenant": "acme"}, {**ITL, **weekly}, other_day))
    assert len(stored.targets) == 4
    with pytest.raises(Invalid, match=r"targets\.1"):
        targets.put(control, update(1, {**ITL, **weekly}, {**ITL, "ms": 8.0, **weekly}))
    with pytest.raises(Invalid, match="Atlantis"):
        targets.put(control, update(1, {**ITL, "windows": [{"zone": "Europe/Atlantis"}]}))


def test_a_tenant_sees_everyones_targets_and_its_own(control: Control) -> None:
    acme_and_rival(control)
    targets.put(control, update(0, ITL, {**ITL, "ms": 30.0, "tenant": "acme"}, {**ITL, "ms": 20.0, "tenant": "rival"}))
    acme = Principal("ann", "acme", "admin", frozenset(SCOPES["admin"]))
    seen = view(control.of(acme))
    assert [(target.tenant, target.ms) for target in seen.targets] == [(None, 45.0), ("acme", 30.0)]
    assert [target.tenant for target in seen.in_force] == [None, "acme"]
    assert len(view(control).targets) == 3


def test_the_engine_is_told_whose_each_adapter_is(control: Control, tmp_path: Path) -> None:
    adapters.upload(control, files.adapter(tmp_path / "captain"), "captain", False)
    targets.put(control, update(0, ITL, {**ITL, "ms": 30.0, "tenant": "default"}))
    with control.store.read() as session:
        order = targets.order(session, now())
    assert order is not None
    assert order.message.tenants == {"captain": "default"}
    assert [(target.tenant, target.ms) for target in order.message.targets] == [(None, 45.0), ("default", 30.0)]


def test_a_window_that_opens_reaches_the_engine_and_the_notices_by_itself(
    control: Control, engine: EnginePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.expect(SetTargets)
    zone = {"windows": [{"start": "09:00", "end": "17:00", "zone": "Europe/Berlin"}]}
    with control.store.read() as session:
        version = targets.view(session).version
    clock = [datetime(2026, 12, 1, 7, 59, 59, tzinfo=UTC)]
    monkeypatch.setattr(targets, "now", lambda: clock[0])
    monkeypatch.setattr(dispatcher.targets, "order", lambda session, _at: order(session, targets.now()))
    targets.put(control, update(version, {**ITL, "ms": 60.0}, {**ITL, "ms": 150.0, **zone}))
    assert engine.expect(SetTargets).targets[0].ms == 60.0
    clock[0] += timedelta(seconds=1)
    assert engine.expect(SetTargets).targets[0].ms == 150.0

    def told() -> bool:
        words = "in force now: ITL p99 ≤ 150 ms (every day 09:00–17:00 Europe/Berlin)"
        return words in [notice.message for notice in notices.page(control, 5, None, ("targets",)).items]

    assert until(told, what="the notice")
