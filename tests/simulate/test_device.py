"""Facts about simulated devices: surfaces, tables, programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Invalid
from core.policy.types import WHOLE, Layout
from core.simulate.device import Device, Program, evaluate
from core.simulate.profile import Surface, read_profile
from tests.simulate.small_device import SPLIT, small_profile

H200 = Device(read_profile("h200"))


def at(surface: Surface, batch: float, context: float) -> float:
    return float(evaluate(surface, np.array([batch]), np.array([batch * context]))[0])


def test_a_surface_is_exact_where_it_was_measured() -> None:
    surface = Surface(base=5.0, per_request=0.01, per_kv_token=1e-4, points=((8, 512, 1.2), (64, 1024, 0.9)))
    assert at(surface, 8, 512) == pytest.approx(1.2 * (5.0 + 0.08 + 8 * 512 * 1e-4), rel=1e-4)
    assert at(surface, 64, 1024) == pytest.approx(0.9 * (5.0 + 0.64 + 64 * 1024 * 1e-4), rel=1e-4)


@given(st.floats(1, 256), st.floats(1, 20_000))
def test_between_points_a_surface_stays_within_their_ratios(batch: float, context: float) -> None:
    points = ((8, 512, 1.2), (64, 1024, 0.9), (1, 8192, 1.5))
    plane = Surface(base=5.0, per_request=0.01, per_kv_token=1e-4)
    ratio = at(plane.model_copy(update={"points": points}), batch, context) / at(plane, batch, context)
    assert 0.9 - 1e-9 <= ratio <= 1.5 + 1e-9


@pytest.mark.parametrize(("batch", "padded"), [(1, 1), (3, 4), (5, 8), (8, 8)])
def test_a_batch_runs_as_the_next_captured_size(small: Device, batch: int, padded: int) -> None:
    assert small.padded(batch) == padded


def test_the_tables_agree_with_the_surfaces() -> None:
    part = next(p for p in H200.profile.layouts if p.layout == Layout("split", 64, 68))
    assert part.beside_ms is not None
    for batch, context in ((8, 1024), (32, 777), (128, 1024), (200, 333)):
        padded, kv = H200.padded(batch), batch * context
        cell = H200.cell(part.layout, padded, kv, context)
        one, tokens = np.array([float(padded)]), np.array([float(max(kv, context * part.longest))])
        for ms, surface in ((cell.alone_ms, part.alone_ms), (cell.beside_ms, part.beside_ms)):
            assert ms == pytest.approx(float(evaluate(surface, one, tokens, part.longest)[0]), rel=0.01)


def test_a_step_waits_for_its_longest_request_where_attention_does_not_split() -> None:
    alike, unlike = H200.cell(WHOLE, 8, 16_000, 2000), H200.cell(WHOLE, 8, 16_000, 12_000)
    layouts = [part.model_copy(update={"longest": 0.0}) for part in H200.profile.layouts]
    split = Device(H200.profile.model_copy(update={"layouts": tuple(layouts)}))
    assert unlike.alone_ms > alike.alone_ms + 1.0
    assert split.cell(WHOLE, 8, 16_000, 12_000) == split.cell(WHOLE, 8, 16_000, 2000)


def test_the_arena_holds_whole_blocks_of_kv_tokens(small: Device) -> None:
    assert small.pages_per_block == 64
    assert small.kv_tokens == 100 * 1024


def test_noise_has_its_quantiles(small: Device) -> None:
    noise = small.noise(10_000)
    assert np.quantile(noise, [0.5, 0.99]) == pytest.approx([0.0, 1.0], abs=0.01)
    assert noise == sorted(noise)


def test_prefill_costs_more_behind_a_context() -> None:
    assert H200.prefill_ms(1000, 8000) > H200.prefill_ms(1000, 0)
    assert H200.prefill_ms(2000, 0) == pytest.approx(H200.prefill_ms(1000, 0) + H200.prefill_ms(1000, 1000))


@pytest.mark.parametrize("name", ["h200", "ada6000", "a100"])
def test_shipped_devices_are_whole(name: str) -> None:
    device = Device(read_profile(name))
    profile = device.profile
    assert profile.provenance
    for part in profile.layouts:
        assert part.decode_sms + part.finetune_sms <= profile.sms
        cell = device.cell(part.layout, 32, 32 * 1024, 1024)
        assert 0 < cell.alone_ms <= cell.beside_ms
        if part.kind != "whole":
            assert cell.speed <= part.alone_speed * 1.05
    assert profile.tasklets.activation_pages + profile.tasklets.state_pages < profile.arena_pages


def test_fewer_decode_sms_never_make_a_large_step_faster() -> None:
    splits = sorted((p for p in H200.layouts if p.kind == "split"), key=lambda p: p.decode_sms)
    ms = [H200.cell(layout, 128, 128 * 1024, 1024).alone_ms for layout in splits]
    assert ms == sorted(ms, reverse=True)


# ---- programs --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(0, 40), st.integers(0, 40))
def test_work_adds_up_over_micro_batches(start: int, first: int, second: int) -> None:
    program = Program(Device(small_profile()))
    whole = program.work_ms(start, first + second)
    size = len(program)
    assert whole == pytest.approx(program.work_ms(start, first) + program.work_ms((start + first) % size, second))
    assert whole == pytest.approx(first + second)


def test_a_program_is_forward_head_backward_optimizer() -> None:
    program = Program(H200)
    assert program.kinds == ("forward",) * 32 + ("head",) * 2 + ("backward",) * 32 + ("optimizer",)
    assert program.tokens / program.total_ms * H200.alone_speed(WHOLE) * 1e3 == pytest.approx(15_765, rel=1e-3)


def test_coarser_and_finer_tasklets_are_the_same_work() -> None:
    plain = Program(H200)
    for other in (Program(H200, layers=4), Program(H200, head_parts=3), Program(H200, layers=3, head_parts=2)):
        assert other.total_ms == pytest.approx(plain.total_ms)
        assert other.tokens == plain.tokens
    assert len(Program(H200, layers=4)) == 8 + 2 + 8 + 1


def test_a_short_micro_batch_costs_more_a_token_and_a_chunked_one_too() -> None:
    whole, short, chunked = Program(H200), Program(H200, tokens=128), Program(H200, chunk_tokens=128)
    assert short.total_ms / 128 > 1.7 * whole.total_ms / 2048
    assert chunked.total_ms == pytest.approx(16 * (short.total_ms - short.ms[-1]) + whole.ms[-1])
    assert (chunked.tokens, chunked.kinds.count("optimizer")) == (2048, 1)
    assert chunked.activation_pages == short.activation_pages < whole.activation_pages / 15


@pytest.mark.parametrize("shape", [{"tokens": 0}, {"chunk_tokens": 0}, {"head_parts": 0}, {"layers": 0}])
def test_a_program_of_nothing_is_refused(shape: dict[str, int]) -> None:
    with pytest.raises(Invalid, match="give at least 1"):
        Program(H200, **shape)  # type: ignore[arg-type]


def test_layouts_are_named_as_policies_name_them(small: Device) -> None:
    assert small.layouts[0] == WHOLE
    assert SPLIT in small.layouts
