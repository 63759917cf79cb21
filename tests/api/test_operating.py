"""What an operator asks of the API: frontier, notices, alerts, settings, the machine."""

from __future__ import annotations

from pathlib import Path

import httpx

from core.config import Settings
from tests.api.inside import inside
from tests.control.peer import EnginePeer
from tests.stack import until

LEARNT = {
    "steps": [(2, 20.0, 24.0)],
    "tasklets": {"forward": (5.0, 6.0), "head": (9.0, 10.0), "backward": (8.0, 9.0), "optimizer": (4.0, 5.0)},
    "mix": {"forward": 4.0, "head": 1.0, "backward": 4.0, "optimizer": 1.0},
    "step_tokens": 256.0,
}


def test_the_frontier_says_what_is_missing_until_the_engine_knows_itself(
    http: httpx.Client, settings: Settings
) -> None:
    assert http.get("/api/frontier").json()["missing"] == "no engine is connected"
    engine = EnginePeer(settings.resolved_link_url)
    try:
        engine.hello(policy="tasklet_slices", margin=0.1)
        until(lambda: http.get("/api/engine").json()["state"] == "ready", what="the engine")
        assert "no profile" in http.get("/api/frontier").json()["missing"]
        engine.telemetry(decode_steps=10, decode_tokens=20, running=2, kv_used=600, itl=[(20.0, 20)])
        engine.learnt(**LEARNT)
        asked = lambda: http.get("/api/frontier", timeout=150).json()  # noqa: E731
        found = until(lambda: (now := asked())["source"] == "learnt" and now, 150, "the frontier")
    finally:
        engine.close()
    assert (found["policy"], found["margin"], found["batch"]) == ("tasklet_slices", 0.1, 2)
    assert found["now"]["target_ms"] == 41.0, "the target that the engine's solo step gave"
    tokens = [point["finetune_tokens_s"] for point in found["points"]]
    assert tokens[0] < tokens[-1] <= found["exclusive_tokens_s"]


def test_alert_rules_are_made_and_refused_with_the_field(http: httpx.Client) -> None:
    made = http.put("/api/alerts/rules/slow", json={"metric": "itl_p99_ms", "comparison": "above", "threshold": 80})
    assert made.json()["name"] == "slow"
    assert "slow" in [rule["name"] for rule in http.get("/api/alerts/rules").json()]
    odd = http.put("/api/alerts/rules/slow", json={"metric": "mood", "comparison": "above", "threshold": 80})
    assert (odd.status_code, odd.json()["error"]["param"]) == (422, "metric")
    assert http.delete("/api/alerts/rules/slow").status_code == 204
    assert http.delete("/api/alerts/rules/slow").json()["error"]["code"] == "alert_rule_not_found"
    assert http.get("/api/alerts", params={"state": "resolved"}).json()["items"] == []


def test_settings_are_told_without_what_is_secret(http: httpx.Client, settings: Settings) -> None:
    told = http.get("/api/settings").json()
    assert told["api_port"] == str(settings.api_port)
    assert told["finetune.window_layers"] == "4"
    assert not any("secret" in value for value in told.values())


def test_what_concerns_the_platform_is_not_another_tenants_to_see(data_dir: Path) -> None:
    with inside(data_dir) as there:
        for path in ("/api/alerts", "/api/alerts/rules", "/api/settings"):
            assert there.ann.get(path).status_code == 403, path
            assert there.admin.get(path).status_code == 200, path
        assert there.ann.get("/api/doctor").status_code == 403
        targets = [{"kind": "itl", "ms": 45}, {"kind": "itl", "ms": 30, "tenant": "a"}]
        assert there.admin.put("/api/targets", json={"version": 0, "targets": targets}).status_code == 200
        seen = {name: len(getattr(there, name).get("/api/targets").json()["in_force"]) for name in ("ann", "bob")}
        assert seen == {"ann": 2, "bob": 1}
