"""Targets: versions, the measured default, the tightest."""

from __future__ import annotations

import pytest

from core.api import schemas
from core.control import targets
from core.control.context import Control
from core.errors import Conflict, Invalid
from db import targets as rows

ITL = {"kind": "itl", "ms": 45.0, "quantile": 0.99}


def update(version: int, *values: dict[str, object]) -> schemas.TargetsUpdate:
    return schemas.TargetsUpdate.model_validate({"version": version, "targets": values})


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
    with pytest.raises(Conflict, match="version 1 by now, not 0; in force: itl p99 ≤ 45 ms"):
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
        assert targets.tightest_itl_ms(rows.current(session)) == 20
    assert targets.tightest_itl_ms(None) is None
