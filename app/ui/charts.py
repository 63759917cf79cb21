"""Live charts: option objects for Streamlit's ECharts element, drawn under a fixed key.

With its key and renderer unchanged the element keeps its canvas and takes the new option in one frame, so nothing
flickers. Time axes show the viewer's zone because the browser formats them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from app.ui.theme import Colours
from core.api.schemas import FrontierPoint, JobMetric, TelemetryPoint

Option = dict[str, Any]
Pick = Callable[[TelemetryPoint], float | None]
_SMOOTHING_STEPS = 10
_POINTS = 1500
_LEGEND: Option = {
    "type": "scroll", "pageIconSize": 9, "top": 0, "left": 0, "icon": "roundRect", "itemWidth": 12, "itemHeight": 4,
    "itemGap": 14,
}  # fmt: skip


def _line(name: str, colour: str, data: Sequence[Sequence[float | None]], **extra: Any) -> Option:
    return {
        "name": name, "type": "line", "data": data, "showSymbol": False, "color": colour, "connectNulls": False,
        "lineStyle": {"width": 1.6}, "emphasis": {"disabled": True}, **extra,
    }  # fmt: skip


def _option(series: list[Option], x_axis: Option, unit: str, decimals: int = 1, **y_axis: Any) -> Option:
    # The unit stands in a printf format, where a percent sign is written twice.
    unit = unit.replace("%", "%%")
    return {
        "animation": False,
        "grid": {"left": 4, "right": 26, "top": 34, "bottom": 2, "containLabel": True},
        "legend": {**_LEGEND},
        "tooltip": {"trigger": "axis", "confine": True, "valueFormatter": f"%,.{decimals}f {unit}"},
        "xAxis": {"axisTick": {"show": False}, "splitLine": {"show": False}, **x_axis},
        "yAxis": {"type": "value", "splitNumber": 4, **y_axis},
        "series": series,
    }


def _times(points: Sequence[TelemetryPoint], pick: Pick) -> list[list[float | None]]:
    rows: list[list[float | None]] = []
    for point in points:
        value = pick(point)
        rows.append([round(point.time.timestamp() * 1000), None if value is None else round(value, 3)])
    return rows


def _window(points: Sequence[TelemetryPoint], seconds: int) -> Option:
    """The time axis: `seconds` up to the newest point, so that the chart scrolls instead of rescaling."""
    if not points:
        return {"type": "time"}
    end = round(points[-1].time.timestamp() * 1000)
    # A time at either end would be cut off by the chart's edge.
    inside = {"showMinLabel": False, "showMaxLabel": False}
    return {"type": "time", "min": end - seconds * 1000, "max": end, "splitNumber": 4, "axisLabel": inside}


def latency(points: Sequence[TelemetryPoint], seconds: int, palette: Colours, target_ms: float | None) -> Option:
    """ITL p50 and p99 of decode against its target, ms."""
    axis = _window(points, seconds)
    series = [
        _line("p50", palette.decode_soft, _times(points, lambda point: point.itl_p50_ms)),
        _line("p99", palette.decode, _times(points, lambda point: point.itl_p99_ms)),
    ]
    if target_ms is not None and points:
        ends: list[list[float | None]] = [[axis["min"], target_ms], [axis["max"], target_ms]]
        dashed = {"lineStyle": {"width": 1.4, "type": "dashed"}, "tooltip": {"show": False}}
        series.append(_line(f"target {target_ms:,.0f} ms", palette.target, ends, **dashed))
    return _option(series, axis, "ms")


def stalls(points: Sequence[TelemetryPoint], seconds: int, palette: Colours) -> Option:
    """Gaps that a prefill stretched, and the time to first token, ms; both apart from the ITL."""
    bars = {
        "name": "stalls p99", "type": "bar", "color": palette.stall, "barMaxWidth": 4,
        "data": _times(points, lambda point: point.stall_p99_ms),
    }  # fmt: skip
    first = _line("TTFT p99", palette.decode, _times(points, lambda point: point.ttft_p99_ms), connectNulls=True)
    return _option([bars, first], _window(points, seconds), "ms")


def throughput(points: Sequence[TelemetryPoint], seconds: int, palette: Colours) -> Option:
    """Decode and finetune tokens per second."""
    series = [
        _line("decode", palette.decode, _times(points, lambda point: point.decode_tokens_s)),
        _line("finetune", palette.finetune, _times(points, lambda point: point.finetune_tokens_s)),
    ]
    return _option(series, _window(points, seconds), "tokens/s", 0)


def device(points: Sequence[TelemetryPoint], seconds: int, palette: Colours) -> Option:
    """The share of time that decode steps and finetuning take, and how much of the device is in use, percent."""
    split: list[tuple[str, str, Pick]] = [
        ("decode", palette.decode, lambda point: point.decode_share * 100),
        ("finetune", palette.finetune, lambda point: point.finetune_share * 100),
    ]
    series = [
        _line(name, colour, _times(points, pick), stack="busy", areaStyle={"opacity": 0.35}, lineStyle={"width": 1})
        for name, colour, pick in split
    ]
    dotted = {"width": 1.2, "type": "dotted"}
    series.append(
        _line("in use", palette.stall, _times(points, lambda point: point.busy_share * 100), lineStyle=dotted)
    )
    return _option(series, _window(points, seconds), "%", 0, min=0, max=100, interval=25)


def load(points: Sequence[TelemetryPoint], seconds: int, palette: Colours) -> Option:
    """Requests in the decode batch and requests that wait."""
    series = [
        _line("in the batch", palette.decode, _times(points, lambda point: point.batch), step="end"),
        _line("waiting", palette.target, _times(points, lambda point: point.waiting), step="end"),
    ]
    return _option(series, _window(points, seconds), "requests", 1, minInterval=1, min=0)


def kv_cache(points: Sequence[TelemetryPoint], seconds: int, palette: Colours) -> Option:
    """KV cache in use, percent of its tokens."""
    pick: Pick = lambda point: 100 * point.kv_used / point.kv_total if point.kv_total else None  # noqa: E731
    series = [_line("KV cache", palette.decode, _times(points, pick), areaStyle={"opacity": 0.2})]
    return _option(series, _window(points, seconds), "%", 1, min=0, max=100, interval=25)


def frontier(
    points: Sequence[FrontierPoint],
    palette: Colours,
    *,
    chosen_ms: float | None,
    now: FrontierPoint | None,
    measured: tuple[float, float] | None,
) -> Option:
    """Finetune tokens/s against the ITL target: the simulated points, what was chosen, the target in force as simulated
    and (ms, tokens/s) as measured."""
    line = [[point.target_ms, round(point.finetune_tokens_s, 2)] for point in points]
    series = [_line("simulated", palette.finetune, line, showSymbol=True, symbol="circle", symbolSize=6)]
    if now is not None:
        spot = [[now.target_ms, round(now.finetune_tokens_s, 2)]]
        series.append(_spot("target in force, simulated", palette.target, spot, "circle"))
    if measured is not None:
        series.append(_spot("last minute, measured", palette.decode, [list(measured)], "diamond"))
    if chosen_ms is not None:
        top = max([y for _, y in line] + ([measured[1]] if measured else []) + [1.0])
        dashed = {"lineStyle": {"width": 1.4, "type": "dashed"}, "tooltip": {"show": False}}
        series.append(_line(f"{chosen_ms:,.0f} ms", palette.stall, [[chosen_ms, 0.0], [chosen_ms, top]], **dashed))
    option = _option(series, {"type": "value", "scale": True, "name": "", "splitNumber": 6}, "tokens/s", 1, min=0)
    option["xAxis"]["axisLabel"] = {"formatter": "{value} ms", "showMaxLabel": False}
    option["tooltip"]["trigger"] = "item"
    return option


def _spot(name: str, colour: str, data: Sequence[Sequence[float]], symbol: str) -> Option:
    return {"name": name, "type": "scatter", "data": data, "color": colour, "symbol": symbol, "symbolSize": 13}


def past(points: Sequence[TelemetryPoint], seconds: int, palette: Colours) -> Option:
    """Target and ITL p99 (left, ms), finetune tokens/s (right), and where the guard held finetuning back."""
    series = [
        _line("finetune", palette.finetune, _times(points, lambda point: point.finetune_tokens_s), yAxisIndex=1,
              areaStyle={"opacity": 0.12}, lineStyle={"width": 1}),
        _line("ITL p99", palette.decode, _times(points, lambda point: point.itl_p99_ms)),
        _line("target", palette.target, _times(points, lambda point: point.target_ms), step="end",
              lineStyle={"width": 1.4, "type": "dashed"}),
    ]  # fmt: skip
    held: list[list[Option]] = [
        [{"xAxis": round(point.time.timestamp() * 1000)},
         {"xAxis": round((point.time.timestamp() + point.interval_s) * 1000)}]
        for point in points if point.guarded_share > 0
    ]  # fmt: skip
    if held:
        series.append(
            {
                "name": "guard", "type": "line", "data": [], "color": palette.stall,
                "markArea": {"silent": True, "itemStyle": {"color": palette.stall, "opacity": 0.22}, "data": held},
            }
        )  # fmt: skip
    option = _option(series, _window(points, seconds), "", 1)
    option["grid"]["right"] = 4
    option["yAxis"] = [
        {"type": "value", "splitNumber": 4, "min": 0, "axisLabel": {"formatter": "{value} ms"}},
        {"type": "value", "splitNumber": 4, "min": 0, "splitLine": {"show": False},
         "axisLabel": {"formatter": "{value} tokens/s"}},
    ]  # fmt: skip
    return option


def memory(points: Sequence[TelemetryPoint], seconds: int, palette: Colours) -> Option:
    """Who holds the arena's memory: KV cache and jobs, stacked up to all of it, in `memory_unit`."""
    unit, scale = memory_unit(points)

    def held(point: TelemetryPoint, of_jobs: bool) -> float | None:
        if point.memory is None:
            return None
        return sum(one.bytes for one in point.memory.owners if one.name.startswith("job ") == of_jobs) / scale

    series = [
        _line(name, colour, _times(points, pick), stack="memory", areaStyle={"opacity": 0.35}, step="end")
        for name, colour, pick in (
            ("KV cache", palette.decode, lambda point: held(point, False)),
            ("finetuning", palette.finetune, lambda point: held(point, True)),
        )
    ]
    # The axis ends at all of the memory, which is no round number and would be written over the one below it.
    top = {"max": _capacity(points) / scale, "axisLabel": {"showMaxLabel": False}} if points else {}
    return _option(series, _window(points, seconds), unit, 1, min=0, **top)


def memory_unit(points: Sequence[TelemetryPoint]) -> tuple[str, int]:
    """The unit that suits the arena's size, and its bytes."""
    return ("GiB", 2**30) if _capacity(points) >= 8 * 2**30 else ("MiB", 2**20)


def _capacity(points: Sequence[TelemetryPoint]) -> int:
    return next((point.memory.capacity_bytes for point in reversed(points) if point.memory), 0)


def smoothed(values: Sequence[float], steps: int = _SMOOTHING_STEPS) -> list[float]:
    """Exponential moving average over about `steps` values, without the start's bias towards zero."""
    decay = 1 - 1 / steps
    mean, weight = 0.0, 0.0
    out = []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def thinned(pairs: list[list[float | None]], most: int = _POINTS) -> list[list[float | None]]:
    """Every n-th pair and the last one, so that at most about `most` are left."""
    every = -(-len(pairs) // most)
    return pairs if every <= 1 else [*pairs[:-1:every], pairs[-1]]


def loss(metrics: Sequence[JobMetric], total_steps: int | None, palette: Colours) -> Option:
    """Training loss per step, its moving average and the evaluation loss."""
    steps = [metric.step for metric in metrics if metric.loss is not None]
    losses = [metric.loss for metric in metrics if metric.loss is not None]
    raw: list[list[float | None]] = [[step, round(value, 5)] for step, value in zip(steps, losses, strict=True)]
    mean: list[list[float | None]] = [
        [step, round(value, 5)] for step, value in zip(steps, smoothed(losses), strict=True)
    ]
    held_out: list[list[float | None]] = [
        [metric.step, round(metric.eval_loss, 5)] for metric in metrics if metric.eval_loss is not None
    ]
    series = [
        _line("loss per step", palette.finetune_soft, thinned(raw), lineStyle={"width": 1}),
        _line(f"average of {_SMOOTHING_STEPS} steps", palette.finetune, thinned(mean), lineStyle={"width": 2}),
    ]
    if held_out:
        series.append(_line("evaluation", palette.decode, held_out, showSymbol=True, symbol="circle", symbolSize=6))
    return _option(series, _steps(total_steps), "", 3, scale=True)


def losses(jobs: Sequence[tuple[str, Sequence[JobMetric]]], palette: Colours, *, held_out: bool) -> Option:
    """Several jobs' losses by step: moving averages of training, or what the evaluations were."""
    colours = (palette.finetune, palette.decode, palette.target, palette.stall, *palette.segments)
    series = []
    for number, (name, metrics) in enumerate(jobs):
        picked = [(m.step, m.eval_loss if held_out else m.loss) for m in metrics]
        pairs = [(step, value) for step, value in picked if value is not None]
        values = [value for _, value in pairs] if held_out else smoothed([value for _, value in pairs])
        data: list[list[float | None]] = [
            [step, round(value, 5)] for (step, _), value in zip(pairs, values, strict=True)
        ]
        series.append(_line(name, colours[number % len(colours)], thinned(data), showSymbol=held_out))
    return _option(series, _steps(None), "", 3, scale=True)


def gradient_norm(metrics: Sequence[JobMetric], total_steps: int | None, palette: Colours) -> Option:
    """Gradient norm before clipping, per step."""
    norms: list[list[float | None]] = [
        [metric.step, round(metric.grad_norm, 5)] for metric in metrics if metric.grad_norm is not None
    ]
    return _option([_line("gradient norm", palette.stall, thinned(norms))], _steps(total_steps), "", 3, min=0)


def learning_rate(metrics: Sequence[JobMetric], total_steps: int | None, palette: Colours) -> Option:
    """Learning rate per step."""
    rates: list[list[float | None]] = [
        [metric.step, metric.learning_rate] for metric in metrics if metric.learning_rate is not None
    ]
    option = _option([_line("learning rate", palette.decode, thinned(rates))], _steps(total_steps), "", 6, min=0)
    option["yAxis"]["axisLabel"] = {"showMinLabel": True}
    return option


def _steps(total: int | None) -> Option:
    axis: Option = {"type": "value", "minInterval": 1, "min": 0}
    return {**axis, "max": total} if total else axis


def chart(title: str, option: Option, *, key: str, height: int = 210, note: str = "") -> None:
    """Draw a live chart under its heading; `note` says what the heading leaves open, such as the unit."""
    st.markdown(f"**{title}**" + (f" :small[:gray[{note}]]" if note else ""))
    st.echarts_chart(option, key=key, height=height, alt=title)
