"""Facts about making device profiles from measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.policy.types import WHOLE, Layout
from core.simulate import fit
from core.simulate.device import Device, evaluate
from core.simulate.profile import read_profile

BATCH, CONTEXT = (np.array(x, dtype=float) for x in ([1, 8, 32, 64, 128, 256], [512, 4096, 1024, 2048, 256, 1024]))
DURATIONS = [0.1, *[1.5] * 32, 4.0, 4.0, *[2.0] * 32, 0.4]


def ms_of(batch: Any, context: Any) -> Any:
    return 5.0 + 0.02 * batch + 3e-5 * batch * context


def test_a_plane_is_found_again() -> None:
    found = fit.surface(BATCH, CONTEXT, ms_of(BATCH, CONTEXT))
    assert (found.base, found.per_request, found.per_kv_token) == pytest.approx((5.0, 0.02, 3e-5), rel=1e-3)
    assert [factor for *_, factor in found.points] == pytest.approx([1.0] * 6, abs=1e-3)


def test_one_odd_point_does_not_tilt_the_plane_and_is_kept() -> None:
    ms = ms_of(BATCH, CONTEXT)
    ms[0] *= 1.4
    found = fit.surface(BATCH, CONTEXT, ms)
    assert found.per_kv_token == pytest.approx(3e-5, rel=0.1)
    assert evaluate(found, BATCH[:1], BATCH[:1] * CONTEXT[:1])[0] == pytest.approx(ms[0], rel=1e-3)


@pytest.mark.parametrize("requests", [0.0, 4.0, 12.0])
def test_how_many_requests_attention_works_on_at_once_is_found(requests: float) -> None:
    batch, context = np.array([1, 1, 8, 8, 32, 64, 128.0]), np.array([512, 8192, 4096, 16384, 1024, 2048, 256.0])
    ms = 5.0 + 0.02 * batch + 3e-5 * context * np.maximum(batch, requests)
    assert fit.longest_of(batch, context, ms) == requests
    found = fit.surface(batch, context, ms, requests)
    assert found.per_kv_token == pytest.approx(3e-5, rel=1e-3)
    assert [factor for *_, factor in found.points] == pytest.approx([1.0] * 7, abs=1e-3)


def test_no_coefficient_is_negative() -> None:
    found = fit.surface(BATCH, CONTEXT, 9.0 - 0.01 * BATCH)
    assert min(found.base, found.per_request, found.per_kv_token) >= 0


def test_filling_a_budget_stays_before_the_first_tasklet_that_never_fits() -> None:
    assert fit.filled([1.0, 1.0, 5.0], 2.5) == pytest.approx(1.0)  # two in one step, none in the next
    assert fit.filled([1.0, 1.0], 2.5) == pytest.approx(2.0)


def row(layout: str, decode: int, part: int, batch: int, context: int, slow: float, **more: Any) -> dict[str, Any]:
    ms = slow * float(ms_of(batch, context))
    cell = {"layout": layout, "dec": decode, "ft": part, "bs": batch, "ctx": context}
    return cell | {"p50": ms, "p99": 1.05 * ms} | more


def made(folder: Path) -> Device:
    """A device from a small invented recording: a part of 68 SMs that slows decode by 1.3 (confined: 1.2), works at 0.6
    of the whole device alone and at 0.4 (0.3) beside decode."""
    tokens_s = 2048 / sum(DURATIONS) * 1e3

    def counted(speed: float, seconds: float) -> float:
        """tokens/s as the recording counts them: by tasklets launched since the first, not by their work."""
        left, count = speed * seconds * 1e3, 0.0
        for ms in DURATIONS * 50:
            if left < ms:
                return (count + left / ms) / len(DURATIONS) * 2048 / seconds
            left, count = left - ms, count + 1
        raise AssertionError

    grid: list[dict[str, Any]] = []
    for batch, context in [(int(b), int(c)) for b, c in zip(BATCH, CONTEXT, strict=True)] + [(1, 8192)]:
        grid.append(row("whole", 132, 0, batch, context, 1.0, beside=None))
        grid.append(row("split", 64, 68, batch, context, 1.1, beside=None))
        alone = {"beside": "mix", "ft_alone": counted(0.6, 0.6)}
        grid.append(row("split", 64, 68, batch, context, 1.3, ft_tokens_s=counted(0.4, 0.5), **alone))
        grid.append(row("confined", 132, 68, batch, context, 1.2, ft_tokens_s=counted(0.3, 0.5), **alone))
    again = {"p50": float(ms_of(32, 1024)), "p99": float(ms_of(32, 1024)) * 1.05}
    large = {"p50": float(ms_of(128, 1024)), "p99": float(ms_of(128, 1024)) * 1.05}
    probe = {
        "dur": DURATIONS, "ft_full": tokens_s, "torch": "0", "drv": 0,
        "hybrid": {"32": [{"dec": None, "base": again["p50"], "slo": 40, "p50": 40, "ft": 1}], "128": []},
    }  # fmt: skip
    slices = {"dec": {"32": again, "128": large}, "spatial": {}}
    log = "\n".join("bs p50 10.0 p90 10.6 p99 11.0 n 9" for _ in range(3))
    fused = {"bwd": {"128": 10.0, "1024": 40.0, "2048": 80.0}}
    files = {"grid": {"rows": grid}, "probe": probe, "slices": slices, "fused": fused}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "log").write_text(log)
    out = folder / "out.json"
    given = [f"--{name}={folder / name}.json" for name in files]
    fit.main(["h200", *given, f"--log={folder / 'log'}", str(out)])
    return Device(read_profile(out))


def test_a_recording_becomes_the_device_that_made_it(tmp_path: Path) -> None:
    device = made(tmp_path)
    split, confined = Layout("split", 64, 68), Layout("confined", 0, 68)
    assert set(device.layouts) == {WHOLE, split, confined}
    alone, beside = device.cell(WHOLE, 64, 64 * 2048, 2048), device.cell(split, 64, 64 * 2048, 2048)
    assert alone.alone_ms == pytest.approx(ms_of(64, 2048), rel=1e-3)
    assert beside.beside_ms / alone.alone_ms == pytest.approx(1.3, rel=1e-2)
    assert beside.alone_ms / alone.alone_ms == pytest.approx(1.1, rel=1e-2)
    assert device.cell(confined, 64, 64 * 2048, 2048).beside_ms / alone.alone_ms == pytest.approx(1.2, rel=1e-2)
    assert beside.beside_tail == pytest.approx(0.05, rel=1e-2)
    assert device.alone_speed(split) == pytest.approx(0.6, rel=1e-3)
    assert beside.speed == pytest.approx(0.4, rel=1e-3)
    assert device.cell(confined, 64, 64 * 2048, 2048).speed == pytest.approx(0.3, rel=1e-3)
    assert device.alone_speed(WHOLE) == pytest.approx(1.0, rel=1e-3)
    assert device.profile.noise[3] == pytest.approx((0.9, 0.6))
    assert device.profile.tasklets.shorter == ((128, 0.125), (1024, 0.5))


def test_a_device_scaled_by_roofline_is_slower_where_the_chip_is(tmp_path: Path) -> None:
    like = read_profile("h200")
    out = tmp_path / "a100.json"
    source = tmp_path / "h200.json"
    source.write_text(like.model_dump_json(exclude_defaults=True))
    fit.main(["a100", f"--like={source}", str(out)])
    scaled, device = Device(read_profile(out)), Device(like)
    assert scaled.profile.sms == 108
    bandwidth, compute = 4.8 / 2.04, 989 / 312
    ratio = scaled.cell(WHOLE, 32, 32 * 1024, 1024).alone_ms / device.cell(WHOLE, 32, 32 * 1024, 1024).alone_ms
    assert bandwidth <= ratio <= compute
    assert scaled.profile.tasklets.forward_ms[0] == pytest.approx(like.tasklets.forward_ms[0] * compute, rel=1e-3)
    for part in scaled.profile.layouts:
        assert part.decode_sms + part.finetune_sms in (0, part.finetune_sms, 108)


def test_coefficients_become_splits_that_leave_the_rest_to_finetuning(tmp_path: Path) -> None:
    table = tmp_path / "coefficients.csv"
    table.write_text("# where from\ndecode_sm,b0,c0,k0,k2\n40,0.06,20.0,0.0002,0.002\n100,0.05,18.0,0.00015,0\n")
    source, out = tmp_path / "h200.json", tmp_path / "ada.json"
    source.write_text(read_profile("h200").model_dump_json(exclude_defaults=True))
    fit.main(["ada6000", f"--coefficients={table}", f"--like={source}", str(out)])
    device = Device(read_profile(out))
    split = Layout("split", 40, 60)
    assert device.layouts == (WHOLE, split)
    cell = device.cell(split, 16, 16_384, 1024)
    assert cell.alone_ms == pytest.approx(20.0 + 0.06 * 16 + 0.0002 * 16_384)
    assert cell.beside_ms == pytest.approx(cell.alone_ms * (1 + 0.002 * 60), rel=1e-3)
    assert device.alone_speed(split) == pytest.approx(0.6)
    assert 0 < cell.speed < 0.6
