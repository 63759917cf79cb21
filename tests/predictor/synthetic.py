"""A device that follows the two-stage model exactly, measured without noise."""

from __future__ import annotations

from core.policy.types import WHOLE, Layout, TaskletKind
from core.predictor.profile import Machine, Point, Profile, TaskletPoint

SMS = 132
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128)
LAYOUTS = (
    WHOLE,
    Layout("split", 96, 36),
    Layout("split", 64, 68),
    Layout("confined", 0, 36),
    Layout("confined", 0, 68),
)
MACHINE = Machine(gpu="H200", sms=SMS, driver="580", model="llama", engine="sglang 0.5.16", dtype="bfloat16")
TASKLETS: dict[TaskletKind, float] = {"forward": 1.65, "head": 4.4, "backward": 2.0, "optimizer": 0.4}
SIZES = [(1, 512), (1, 4096), (8, 512), (8, 2048), (32, 256), (32, 1024), (64, 512), (128, 256), (128, 1024)]


def step_ms(layout: Layout, batch: int, kv_tokens: int, beside: bool) -> float:
    """The device: a plane in batch and KV tokens, slower on fewer SMs, slower still beside finetuning."""
    slower = SMS / (layout.decode_sms if layout.kind == "split" else SMS)
    alone = 5.0 + 0.01 * slower * batch + 3e-5 * slower * kv_tokens
    return alone * (1 + 0.5 * layout.finetune_sms / SMS) if beside else alone


def profile(tail: float = 1.05) -> Profile:
    """Everything measured at `SIZES`; p99 is `tail` times the median."""
    points, tasklets = [], []
    for kind, ms in TASKLETS.items():
        tasklets.append(TaskletPoint(layout=WHOLE, kind=kind, ms=ms, p99_ms=ms * 1.02))
    for layout in LAYOUTS:
        for batch, context in SIZES:
            kv = batch * context
            for beside in (False, True):
                if layout.kind != ("confined" if not beside else "whole"):
                    ms = step_ms(layout, batch, kv, beside)
                    points.append(
                        Point(
                            layout=layout, batch=batch, kv_tokens=kv, max_kv=context, ms=ms, p99_ms=ms * tail,
                            beside="mix" if beside else None,
                        )
                    )  # fmt: skip
            if layout != WHOLE:
                ms = TASKLETS["forward"] * SMS / layout.finetune_sms
                at = {"layout": layout, "kind": "forward", "p99_ms": ms * 1.1}
                tasklets.append(TaskletPoint(**at, batch=batch, kv_tokens=kv, ms=ms * 1.1))
                if (batch, context) == SIZES[0]:
                    tasklets.append(TaskletPoint(**at, ms=ms))
    return Profile(
        machine=MACHINE, captured=CAPTURED, kv_heads=8, points=tuple(points), tasklets=tuple(tasklets)
    )  # fmt: skip
