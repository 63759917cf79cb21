"""Facts about the frontier's benchmark: what is planned, what is read off it, what its page shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import lora_kernels
from benchmarks.frontier import MODELS, TARGETS, adapter_tensors, planned
from benchmarks.frontier_page import (
    FIXED,
    GOALS,
    KERNELS,
    NOTHING,
    PAGE,
    PLOT,
    REPLAY,
    best,
    figures,
    kernels,
    live,
    plot,
    read,
    recorded,
    replayed,
)
from benchmarks.gpu_session import main as session
from benchmarks.gpu_session import parts
from benchmarks.live import interval, p99, quantile
from benchmarks.page import shown
from core.policy import POLICIES


def options(**changes: Any) -> Any:
    fields = {
        "batches": [32, 128], "steps": 100, "splits": [112, 96, 80, 64], "sms": 132, "policies": ["hybrid"],
        "few": ["chunked"], "profile": None,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_plain_sglang_and_no_job_take_turns_and_policies_come_after_all_fixed_points() -> None:
    points = planned(options())
    assert [point.mode for point in points[:4]] == ["plain", "fixed", "plain", "fixed"]
    first = next(n for n, point in enumerate(points) if point.mode == "policy")
    assert all(point.mode == "policy" for point in points[first:])
    assert {point.batch for point in points[:first]} == {32, 128}


def test_a_policy_of_the_few_runs_at_every_third_target_the_loosest_among_them() -> None:
    points = planned(options())
    for batch in (32, 128):
        ran = {
            name: [p.target_ms for p in points if (p.policy, p.batch) == (name, batch)]
            for name in ("hybrid", "chunked")
        }
        assert sorted(ran["hybrid"]) == sorted(TARGETS[batch])
        assert ran["chunked"] == list(TARGETS[batch][-1::-3])


def test_policies_that_plan_with_an_earlier_profile_need_no_fixed_points() -> None:
    points, again = planned(options()), planned(options(profile="frontier_profile.json"))
    assert [point.mode for point in again[:3]] == ["plain", "plain", "policy"]
    assert again[2:] == [point for point in points if point.mode == "policy"]


def row(policy: str, p99_ms: float, tokens_s: int, target_ms: float | None = None) -> dict[str, Any]:
    return {
        "batch": 32, "policy": policy, "layout": "whole", "after": 0, "target_ms": target_ms, "p99_ms": p99_ms,
        "finetune_tokens_s": tokens_s,
    }  # fmt: skip


def test_what_is_read_off_holds_the_target_and_is_no_policys() -> None:
    rows = [row("static", 9.0, 3000), row("slices", 12.0, 7000), row("hybrid", 9.5, 9000, 10.0)]
    held = best(rows, 32, 10.0, FIXED)
    assert held is not None and held.tokens_s == 3000
    assert best(rows, 32, 8.0, FIXED) is None
    ran = live(rows, 32, 10.0, "hybrid")
    assert ran is not None and ran.tokens_s == 9000
    assert live(rows, 32, 11.0, "hybrid") is None


def test_the_page_and_its_plot_show_what_is_recorded() -> None:
    found = read()
    for name, text in (figures(*found) | kernels(recorded(KERNELS)) | replayed(recorded(REPLAY))).items():
        assert shown(PAGE, name) == text, name
    assert plot(found[0]["rows"]) == PLOT.read_text()
    assert PLOT.read_text().count("<polyline") >= 2 * len(GOALS)


def test_what_has_not_been_measured_is_said_to_be_so() -> None:
    results, _, _ = read()
    empty = figures(results, {}, {})
    assert empty["no_job"] == empty["served"] == empty["more"] == NOTHING


def test_the_kernels_that_are_timed_multiply_by_all_of_an_adapter() -> None:
    shape = MODELS["llama-3-8b"] | {"num_hidden_layers": 1}
    tensors, _ = adapter_tensors(shape, lora_kernels.RANK)
    timed = sum(
        lora_kernels.RANK * (len(pair.outputs) * pair.inputs + sum(pair.outputs)) for pair in lora_kernels.pairs(shape)
    )
    assert timed == sum(tensor.numel() for tensor in tensors.values())


def test_a_steps_sum_counts_every_layer_and_the_blocks_that_are_faster() -> None:
    us = {"product": 50.0, "sglang": 40.0, "bounded": 20.0, "shrink": 15.0, "expand": 25.0, "dense": 10.0}
    us |= {"beside": 6.0, "behind": 8.0, "in_turn": 9.0}
    rows = [
        {"pair": pair.name, "batch": 32, "what": what, "us": value, "shrink": {}, "expand": {}}
        for pair in lora_kernels.pairs(MODELS["llama-3-8b"])
        for what, value in us.items()
    ]
    found = lora_kernels.per_step(rows, MODELS["llama-3-8b"], 32)
    assert found == {
        "product": 6.4, "sglang": 5.12, "bounded": 2.56, "tuned": 1.92, "beside": 0.768, "behind": 1.024,
        "in_turn": 1.152, "dense": 1.28,
    }  # fmt: skip


def test_gaps_count_as_often_as_requests_saw_them() -> None:
    assert quantile([(5.0, 1), (1.0, 98), (9.0, 1)], 0.5) == 1.0
    assert quantile([(5.0, 1), (1.0, 98), (9.0, 1)], 0.99) == 5.0
    assert quantile([], 0.5) is None


def test_the_interval_of_a_p99_is_of_whole_turns_drawn_again() -> None:
    random = np.random.default_rng(1)
    turns = [random.exponential(1.0, 200) for _ in range(10)]
    low, high = interval(turns, p99)
    assert low < p99(np.concatenate(turns)) < high
    assert interval([turns[0]] * 5, p99) == [round(p99(turns[0]), 4)] * 2


def test_every_part_of_the_session_is_a_command_of_this_checkout(tmp_path: Any) -> None:
    found = parts(tmp_path, tmp_path / "trace.csv", None)
    assert len({part.name for part in found}) == len(found)
    soak = next(n for n, part in enumerate(found) if part.name == "soak")
    assert sum(part.seconds for part in found[:soak]) <= 27 * 60
    named = {word for part in found for word in part.command}
    assert {f"benchmarks.{name}" for name in ("frontier", "live", "memory", "exclusive")} <= named
    for word in named:
        path = word.split("::")[0]
        if path.startswith("tests/"):
            assert (PAGE.parent.parent / path).is_file(), path
    assert "--trace" not in {word for part in parts(tmp_path, None, None) for word in part.command}
    assert set(POLICIES) >= {word for part in found if "--few" in part.command for word in _few(part.command)}


def _few(command: Any) -> list[str]:
    rest = list(command)[list(command).index("--few") + 1 :]
    return rest[: next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))]


@pytest.mark.parametrize("ended", [0, 3])
def test_a_session_goes_on_after_a_part_that_fails_and_the_next_one_leaves_out_what_is_through(
    ended: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu_session

    def two(*_: Any) -> list[Any]:
        return [
            gpu_session.Part("first", "ends so", 5.0, ["-c", f"raise SystemExit({ended})"]),
            gpu_session.Part("second", "ends well", 5.0, ["-c", "print('here')"]),
        ]

    monkeypatch.setattr(gpu_session, "parts", two)
    monkeypatch.setattr("sys.argv", ["gpu_session", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        session()
    assert bool(exit_.value.code) == bool(ended)
    assert "here" in (tmp_path / "second.log").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        session()
    told = capsys.readouterr().out
    assert "second: ends well" not in told
    assert ("first: ends so" in told) == bool(ended)
