"""What one reporting interval adds up to."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import psutil
import torch

from core.link.messages import MemoryView, PlanView, Telemetry
from core.policy.types import StepPlan
from core.runtime.clock import Latencies


@dataclass(slots=True)
class Interval:
    """Counters since `started` (monotonic seconds)."""

    started: float
    cpu_started: float = field(default_factory=time.process_time)
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    finetune_tokens: float = 0.0
    finetune_s: float = 0.0
    tasklets: int = 0
    beside: int = 0
    after: int = 0
    last_plan: StepPlan = field(default_factory=StepPlan)

    def telemetry(
        self,
        now: float,
        *,
        engine_id: str,
        device: torch.device,
        sm_share: float | None,
        power_w: float | None,
        policy: str,
        latencies: Latencies,
        running: int,
        waiting: int,
        kv_used: int,
        kv_total: int,
        predicted_step_ms: float | None,
        targets_version: int,
        paused_reason: str | None,
        guard_pauses: int,
        guarded_s: float,
        memory: MemoryView | None,
    ) -> Telemetry:
        """The message for the interval that ends `now`; sm_share, power_w: of a GPU, where they are known."""
        seconds = max(now - self.started, 1e-9)
        steps = max(self.decode_steps, 1)
        return Telemetry(
            engine_id=engine_id,
            time=time.time(),
            interval_s=seconds,
            itl=latencies.itl,
            stalls=latencies.stalls,
            ttft_ms=latencies.ttft,
            tpot_ms=latencies.tpot,
            tenant_itl=latencies.by_tenant,
            decode_steps=self.decode_steps,
            decode_tokens=self.decode_tokens,
            finetune_tokens=round(self.finetune_tokens),
            tasklets=self.tasklets,
            running=running,
            waiting=waiting,
            kv_used=kv_used,
            kv_total=kv_total,
            predicted_step_ms=predicted_step_ms,
            busy_share=busy_share(
                device,
                sm_share,
                work_s=self.decode_s + self.finetune_s,
                cpu_s=time.process_time() - self.cpu_started,
                seconds=seconds,
            ),
            decode_share=min(1.0, self.decode_s / seconds),
            finetune_share=min(1.0, self.finetune_s / seconds),
            memory_bytes=_memory(device),
            power_w=power_w,
            targets_version=targets_version,
            plan=PlanView(
                policy=policy,
                layout=str(self.last_plan.layout),
                beside=self.beside / steps,
                after=self.after / steps,
                reason=self.last_plan.reason,
            ),
            paused_reason=paused_reason,
            guard_pauses=guard_pauses,
            guarded_s=guarded_s,
            memory=memory,
        )


def busy_share(device: torch.device, sm_share: float | None, *, work_s: float, cpu_s: float, seconds: float) -> float:
    """What of the device was in use: a GPU's SMs, or how long steps and tasklets ran on it; a CPU's cores."""
    if device.type == "cuda":
        return sm_share if sm_share is not None else min(1.0, work_s / seconds)
    return min(1.0, cpu_s / (seconds * (os.cpu_count() or 1)))


def _memory(device: torch.device) -> int:
    """Bytes in use: of the GPU, or of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(psutil.Process().memory_info().rss)
