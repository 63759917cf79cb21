"""What moving memory costs: the program measures all that it names, in a small form."""

from __future__ import annotations

import pytest
import torch

from benchmarks import memory
from benchmarks.live import told
from core.link.messages import PlanView, Telemetry
from core.memory.arena import CPU_PAGE_BYTES, Arena, open_arena
from core.memory.rate import Rate
from core.memory.rows import Rows

TINY = memory.Sizes(
    layers=2,
    heads=2,
    head_dim=64,
    tokens=4096,
    weights=2**20,
    batch=1,
    context=1024,
    swapped=2**22,
    job=2**22,
    state=2**21,
)
CPU = torch.device("cpu")


@pytest.fixture
def arena() -> Arena:
    return open_arena(CPU, 64 * CPU_PAGE_BYTES)


@pytest.fixture
def step(arena: Arena) -> memory.Step:
    rows = Rows(arena, "kv cache", [256, 256], 1024)
    rows.resize(1)
    return memory.Step(rows, TINY._replace(layers=1), CPU)


def test_every_figure_is_there_and_speeds_are_of_what_moved() -> None:
    found = memory.measure(TINY, CPU, seconds=0.4)
    assert found["pages"] == 4 * 4096 * 256 // CPU_PAGE_BYTES
    assert min(found["changes"], found["driver_changes"]) >= 2 * memory.TURNS and min(found["steps"].values()) > 0
    changes = [f"{name}_64k_ms" for name in ("grow", "shrink", "put", "clear")]
    for name in (*changes, "decode_p50_ratio", "decode_p99_ratio", "swap_gib_s"):
        assert found[name] > 0, name
    for kind in ("decode", "driver"):
        low, high = found[f"{kind}_p50_ratio_interval"]
        assert 0 < low <= high
    assert set(found["to_host"]) == {"torch", "staging"}
    assert found["swap_gib_s"] == min(found["swap"]["out_gib_s"], found["swap"]["back_gib_s"])


def test_a_reclaim_ends_with_the_kv_cache_at_its_full_size_and_a_job_with_nothing(arena: Arena) -> None:
    rows = Rows(arena, "kv cache", [256, 256], 16_384)
    memory.reclaim(arena, rows, 4, 16, 40 * CPU_PAGE_BYTES)
    assert {one.name: one.pages for one in arena.statistics().owners if one.pages} == {"kv cache": 32}


def test_a_share_gives_everything_up_whatever_the_engine_does(arena: Arena) -> None:
    found = memory.given_up(arena, TINY, CPU)
    assert set(found) == {"nothing", "python", "kernels"}
    for activations, state in found.values():
        assert 0 < activations <= state
    assert arena.statistics().used == 0


def test_a_swap_comes_back_at_its_rate_and_gives_everything_back(arena: Arena, step: memory.Step) -> None:
    found = memory.swap(arena, step, 2**22, Rate(2**26), target_ms=0.0)
    assert 0 < found["back_gib_s"] <= 2**26 / 2**30
    assert found["missed"] == 1.0 and found["steps"] > 0
    assert arena.statistics().used == 2


def test_what_fails_in_the_thread_beside_the_steps_is_raised(step: memory.Step) -> None:
    def work() -> None:
        raise RuntimeError("the driver said no")

    with pytest.raises(RuntimeError, match="the driver said no"):
        memory.beside(step, work)


def test_power_is_the_mean_of_the_reports_that_tell_it() -> None:
    def report(**fields: float) -> Telemetry:
        return Telemetry(engine_id="e", time=1.0, interval_s=0.5, plan=PlanView(policy="p"), **fields)  # type: ignore[arg-type]

    found = told([report(power_w=300.0, busy_share=0.6), report(power_w=500.0), report()], 8.0)
    assert (found["power_w"], found["busy"]) == (400, 0.2)
    assert told([report()], 8.0)["power_w"] is None
