"""Alert rules and their figures as people say them: ``the p99 ITL above 80 ms``, ``the engine is not ready``."""

from __future__ import annotations

from typing import Literal, get_args

from core.api.schemas import AlertMetric, AlertRuleBody

Unit = Literal["%", "ms", "s", "tokens/s", ""]
"""`%`: the figure is a share, from 0 to 1."""

_FIGURES: dict[AlertMetric, tuple[str, Unit]] = {
    "attainment": ("the share of gaps within the ITL target", "%"),
    "itl_p99_ms": ("the p99 ITL", "ms"),
    "stall_p99_ms": ("the p99 of stalls by prefill", "ms"),
    "ttft_p99_ms": ("the p99 TTFT", "ms"),
    "guarded_share": ("the share of time in which the guard held finetuning back", "%"),
    "finetune_tokens_s": ("finetuning, with a job running,", "tokens/s"),
    "kv_used_share": ("the share of the KV cache in use", "%"),
    "waiting_requests": ("the number of requests that wait", ""),
    "queued_jobs": ("the number of queued jobs", ""),
    "longest_wait_s": ("the longest wait of a queued job", "s"),
    "engine_ready": ("the engine's readiness (1: ready, 0: not)", ""),
    "parts_down": ("the number of parts that crashed", ""),
}
assert set(_FIGURES) == set(get_args(AlertMetric))


def unit(metric: AlertMetric) -> Unit:
    return _FIGURES[metric][1]


def figure(metric: AlertMetric) -> str:
    """What a rule looks at, without its article: ``p99 ITL``."""
    return _FIGURES[metric][0].removeprefix("the ").rstrip(",")


def condition(rule: AlertRuleBody) -> str:
    """When the rule's alert begins."""
    name, _ = _FIGURES[rule.metric]
    return _readiness(rule) or f"{name} {rule.comparison} {_amount(rule.metric, rule.threshold)}"


def finding(rule: AlertRuleBody, value: float) -> str:
    """That the condition holds, with the figure: ``the p99 ITL is 61.2 ms, above 45 ms``."""
    name, _ = _FIGURES[rule.metric]
    limit = _amount(rule.metric, rule.threshold)
    return _readiness(rule) or f"{name} is {_amount(rule.metric, value)}, {rule.comparison} {limit}"


def _readiness(rule: AlertRuleBody) -> str | None:
    """The condition of a rule that tells an engine that is ready (1) from one that is not (0)."""
    if rule.metric != "engine_ready":
        return None
    if rule.comparison == "below" and 0 < rule.threshold <= 1:
        return "the engine is not ready"
    if rule.comparison == "above" and 0 <= rule.threshold < 1:
        return "the engine is ready"
    return None


def _amount(metric: AlertMetric, value: float) -> str:
    """A value of the figure to four digits, with its unit."""
    sign = unit(metric)
    amount = value * 100 if sign == "%" else value
    shown = f"{amount:,.0f}" if abs(amount) >= 1000 else f"{amount:.4g}"
    return f"{shown} {sign}".rstrip()
