"""The engine's figures since this process began to follow it, in Prometheus' text format."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from core.telemetry.interval import Interval, Weighted

# Ten buckets a decade from 0.1 ms to 100 s: a percentile read off them is within 13 %, at any speed of decoding.
BOUNDS_MS = np.logspace(-1, 5, 61)
_HISTOGRAMS = {
    "itl": ("harli_itl_seconds", "Gaps between tokens that no prefill stalled, weighted by tokens"),
    "stalls": ("harli_stall_seconds", "Gaps between tokens that a prefill stalled, weighted by tokens"),
    "ttft": ("harli_ttft_seconds", "Time from request to first token"),
    "tpot": ("harli_tpot_seconds", "Mean time per token after the first, of ended requests"),
}
_COUNTERS = {
    "decode_steps": ("harli_decode_steps", "Decode steps"),
    "decode_tokens": ("harli_decode_tokens", "Tokens decoded"),
    "finetune_tokens": ("harli_finetune_tokens", "Tokens trained on"),
    "tasklets": ("harli_tasklets", "Finetune tasklets run"),
    "judged": ("harli_itl_target_tokens", "Tokens whose gap an ITL target applied to"),
    "attained": ("harli_itl_target_attained_tokens", "Tokens whose gap was within the tightest ITL target"),
    "guard_pauses": ("harli_guard_pauses", "Times that the guard made finetuning stand still"),
    "guarded_s": ("harli_guarded_seconds", "Time in which the guard held finetuning back"),
    "decode_s": ("harli_decode_busy_seconds", "Time that decode and prefill steps took"),
    "finetune_s": ("harli_finetune_busy_seconds", "Time that finetuning took"),
    "seconds": ("harli_engine_reported_seconds", "Time that the engine reported on"),
}
_GAUGES = {
    "running": ("harli_running_requests", "Requests decoding"),
    "waiting": ("harli_waiting_requests", "Requests queued"),
    "kv_used": ("harli_kv_used_tokens", "Tokens in the KV cache"),
    "kv_total": ("harli_kv_total_tokens", "Tokens that the KV cache can hold"),
    "memory_bytes": ("harli_memory_bytes", "Device memory in use"),
}


class Totals:
    """Running totals of what intervals bring. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0.0)
        self._tenants: dict[str, tuple[float, float]] = {}
        self._buckets = {name: np.zeros(len(BOUNDS_MS) + 1) for name in _HISTOGRAMS}
        self._sums_s = dict.fromkeys(_HISTOGRAMS, 0.0)
        self._energy_j = self._metered_s = 0.0
        self._last: Interval | None = None

    def add(self, interval: Interval) -> None:
        with self._lock:
            for name in self._counts:
                self._counts[name] += getattr(interval, name)
            for name in _HISTOGRAMS:
                weighted: Weighted = getattr(interval, name)
                index = np.searchsorted(BOUNDS_MS, weighted.values)
                self._buckets[name] += np.bincount(index, weights=weighted.weights, minlength=len(BOUNDS_MS) + 1)
                self._sums_s[name] += float((weighted.values * weighted.weights).sum()) / 1e3
            for tenant, (judged, attained) in interval.tenants.items():
                before = self._tenants.get(tenant, (0.0, 0.0))
                self._tenants[tenant] = before[0] + judged, before[1] + attained
            self._energy_j += interval.energy_j
            self._metered_s += interval.metered_s
            self._last = interval

    def families(self) -> Iterator[Metric]:
        with self._lock:
            for name, (metric, text) in _COUNTERS.items():
                yield CounterMetricFamily(metric, text, value=self._counts[name])
            text = "Tokens whose gap an ITL target of their tenant applied to"
            judged = CounterMetricFamily("harli_tenant_itl_target_tokens", text, labels=["tenant"])
            text = "Tokens whose gap was within their tenant's tightest ITL target"
            attained = CounterMetricFamily("harli_tenant_itl_target_attained_tokens", text, labels=["tenant"])
            for tenant, (all_, within) in self._tenants.items():
                judged.add_metric([tenant], all_)
                attained.add_metric([tenant], within)
            yield judged
            yield attained
            for name, (metric, text) in _HISTOGRAMS.items():
                cumulated = np.cumsum(self._buckets[name])
                bounds = [*(f"{bound / 1e3:.6g}" for bound in BOUNDS_MS), "+Inf"]
                buckets = [(bound, float(count)) for bound, count in zip(bounds, cumulated, strict=True)]
                yield HistogramMetricFamily(metric, text, buckets=buckets, sum_value=self._sums_s[name])
            if self._last is not None:
                for name, (metric, text) in _GAUGES.items():
                    yield GaugeMetricFamily(metric, text, value=getattr(self._last, name))
                if self._last.metered_s > 0:
                    watts = self._last.energy_j / self._last.metered_s
                    yield GaugeMetricFamily("harli_gpu_power_watts", "Power that the GPU draws", value=watts)
                if self._last.memory is not None:
                    yield _arena(self._last.memory)
            if self._metered_s > 0:  # absent where power is not told, rather than zero
                yield CounterMetricFamily("harli_gpu_energy_joules", "Energy that the GPU used", value=self._energy_j)


def _arena(memory: Mapping[str, Any]) -> GaugeMetricFamily:
    """The memory that KV cache and finetuning share, by who holds it; all jobs are one holder."""
    found = GaugeMetricFamily("harli_arena_bytes", "Memory that KV cache and finetuning share", labels=["holder"])
    jobs = sum(owner["bytes"] for owner in memory["owners"] if owner["name"].startswith("job "))
    found.add_metric(["finetuning"], jobs)
    found.add_metric(["kv_cache"], memory["used_bytes"] - jobs)
    found.add_metric(["free"], memory["capacity_bytes"] - memory["used_bytes"])
    return found


def render(
    totals: Totals,
    *,
    jobs: Mapping[str, int],
    targets: Iterable[tuple[str, float, str, float]],
    alerts: Mapping[str, int],
    parts: Iterable[tuple[str, str, int]],
    engine_ready: bool,
    dispatcher: bool,
) -> bytes:
    """The whole exposition. `jobs`: number per state; `targets`: (kind, quantile, tenant or nothing, ms) of those in
    force; `alerts`: number of firing ones per severity; `parts`: (name, state, restarts) of supervised processes."""

    class _All(Collector):
        def collect(self) -> Iterable[Metric]:
            yield from totals.families()
            states = GaugeMetricFamily("harli_jobs", "Finetune jobs by state", labels=["state"])
            for state, count in jobs.items():
                states.add_metric([state], count)
            yield states
            text = "Latency targets in force; tenant is empty for everyone's"
            limits = GaugeMetricFamily("harli_target_seconds", text, labels=["kind", "quantile", "tenant"])
            for kind, quantile, tenant, ms in targets:
                limits.add_metric([kind, f"{quantile:g}", tenant], ms / 1e3)
            yield limits
            firing = GaugeMetricFamily("harli_alerts_firing", "Alerts that fire", labels=["severity"])
            for severity, count in alerts.items():
                firing.add_metric([severity], count)
            yield firing
            up = GaugeMetricFamily("harli_part_ready", "1 while a supervised process is ready", labels=["part"])
            restarts = CounterMetricFamily("harli_part_restarts", "Restarts after a crash", labels=["part"])
            for name, part_state, number in parts:
                up.add_metric([name], float(part_state == "ready"))
                restarts.add_metric([name], number)
            yield up
            yield restarts
            yield GaugeMetricFamily("harli_engine_ready", "1 while an engine reports", value=float(engine_ready))
            text = "1 in the API process that dispatches jobs and follows the engine"
            yield GaugeMetricFamily("harli_dispatcher", text, value=float(dispatcher))

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_All())
    return generate_latest(registry)
