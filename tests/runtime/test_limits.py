"""Which targets a step obeys."""

from __future__ import annotations

from core.link.messages import Target
from core.runtime.limits import Limits

ITL = Target(kind="itl", ms=60.0)
TPOT = Target(kind="tpot", ms=80.0)
ACME = Target(kind="itl", ms=30.0, tenant="acme")
BATCH = Target(kind="itl", ms=200.0, tenant="batch")
OWNERS = {"captain": "acme", "nightly": "batch", "other": "nobody"}


def applied(limits: Limits, **requests: str | None) -> dict[tuple[str, float], list[str]]:
    found = limits.applied(list(requests), list(requests.values()))
    return {(one.target.kind, one.target.ms): list(one.requests) for one in found}


def test_everyones_targets_apply_to_every_request() -> None:
    limits = Limits((ITL, TPOT))
    assert applied(limits, a=None, b="captain") == {("itl", 60.0): ["a", "b"], ("tpot", 80.0): ["a", "b"]}
    assert limits.itl_ms(["a"], [None]) == 60.0


def test_a_tenants_target_takes_the_place_of_everyones_of_its_kind() -> None:
    limits = Limits((ITL, TPOT, ACME, BATCH), OWNERS)
    assert applied(limits, a=None, b="captain") == {
        ("itl", 60.0): ["a"], ("tpot", 80.0): ["a", "b"], ("itl", 30.0): ["b"],
    }  # fmt: skip


def test_a_step_obeys_the_tightest_that_applies_to_a_running_request() -> None:
    limits = Limits((ITL, ACME, BATCH), OWNERS)
    assert limits.itl_ms(["a", "b"], [None, "captain"]) == 30.0
    assert limits.itl_ms(["a", "c"], [None, "nightly"]) == 60.0
    assert limits.itl_ms(["c"], ["nightly"]) == 200.0, "a looser one counts when its tenant runs alone"


def test_an_adapter_of_a_tenant_without_targets_is_everyones() -> None:
    limits = Limits((ITL, ACME), OWNERS)
    assert applied(limits, a="other", b="unknown") == {("itl", 60.0): ["a", "b"]}


def test_adapters_are_asked_for_only_when_they_matter() -> None:
    assert not Limits((ITL, TPOT), OWNERS).by_tenant
    assert not Limits((ITL, ACME)).by_tenant, "the tenant has no adapter"
    assert Limits((ITL, ACME), OWNERS).by_tenant


def test_without_running_requests_nothing_applies() -> None:
    for limits in (Limits(), Limits((ITL,)), Limits((ITL, ACME), OWNERS)):
        assert limits.applied([], []) == ()
        assert limits.itl_ms([], []) is None


def test_tenants_are_told_for_those_requests_that_have_targets_of_their_own() -> None:
    assert Limits((ITL, ACME), OWNERS).tenants(["a", "b", "c"], ["captain", "nightly", None]) == {"a": "acme"}
    assert Limits((ITL,), OWNERS).tenants(["a"], ["captain"]) == {}
