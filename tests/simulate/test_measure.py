"""Facts about profiling a simulated device, and simulating a profiled one."""

from __future__ import annotations

import pytest

from core.errors import Invalid
from core.policy.types import WHOLE
from core.predictor.two_stage import TwoStagePredictor
from core.simulate.device import Device
from core.simulate.measure import device_of, profile_device
from core.simulate.profile import read_profile

H200 = read_profile("h200")
DEVICE = Device(H200)
PROFILE = profile_device(DEVICE)
AGAIN = Device(
    device_of(
        PROFILE,
        H200,
        layers=32,
        micro_batch_tokens=2048,
        arena_pages=H200.arena_pages,
        kv_bytes_per_token=H200.kv_bytes_per_token,
    )
)


def test_every_layout_is_profiled_beside_and_all_but_confined_alone() -> None:
    for layout in DEVICE.layouts:
        points = [point for point in PROFILE.points if point.layout == layout]
        assert any(point.beside for point in points) == (layout != WHOLE)
        assert any(point.beside is None for point in points) == (layout.kind != "confined")


def test_a_small_device_is_not_profiled_beyond_its_memory() -> None:
    small = Device(H200.model_copy(update={"arena_pages": 64 * 40}))
    assert max(point.kv_tokens for point in profile_device(small).points) <= 40 * 1024


def test_the_predictor_that_is_fitted_to_it_is_near_the_device() -> None:
    predictor = TwoStagePredictor(PROFILE)
    errors = []
    for layout in DEVICE.layouts:
        for batch, context in ((8, 1024), (32, 1024), (64, 1024), (128, 512)):
            if layout.kind == "confined":
                continue
            cell = DEVICE.cell(layout, batch, batch * context, context)
            errors.append(abs(predictor.decode_ms(layout, batch, batch * context, context) / cell.alone_ms - 1))
    assert sorted(errors)[len(errors) // 2] < 0.03


def test_a_profiled_device_is_simulated_as_it_was() -> None:
    for layout in DEVICE.layouts:
        for batch, context in ((8, 4096), (32, 1024), (128, 256)):
            was, now = (device.cell(layout, batch, batch * context, context) for device in (DEVICE, AGAIN))
            assert now.alone_ms == pytest.approx(was.alone_ms, rel=0.02)
            assert now.beside_ms == pytest.approx(was.beside_ms, rel=0.02)
            assert now.speed == pytest.approx(was.speed / DEVICE.alone_speed(WHOLE), rel=0.25)


def test_a_tasklet_counts_for_the_speed_of_a_micro_batch_by_its_share_of_the_work() -> None:
    tasklets = tuple(
        t.model_copy(update={"ms": 2 * t.ms, "p99_ms": 2 * t.p99_ms})
        if t.kind == "optimizer" and t.layout != WHOLE
        else t
        for t in PROFILE.tasklets
    )
    slower = Device(
        device_of(
            PROFILE.model_copy(update={"tasklets": tasklets}), H200, layers=32, micro_batch_tokens=2048,
            arena_pages=H200.arena_pages, kv_bytes_per_token=H200.kv_bytes_per_token,
        )
    )  # fmt: skip
    for layout in DEVICE.layouts[1:]:
        was, now = (device.cell(layout, 32, 32 * 1024, 1024).speed for device in (AGAIN, slower))
        assert now == pytest.approx(was, rel=0.01) and now < was  # half a millisecond of 130
        assert slower.alone_speed(layout) == pytest.approx(AGAIN.alone_speed(layout), rel=0.01)


def test_a_profile_without_tasklets_is_refused() -> None:
    bare = PROFILE.model_copy(update={"tasklets": ()})
    with pytest.raises(Invalid, match="NVIDIA H200: no forward, head, backward, optimizer tasklets on the"):
        device_of(bare, H200, layers=32, micro_batch_tokens=2048, arena_pages=1, kv_bytes_per_token=1)
