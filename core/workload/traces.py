"""Arrival traces: the public formats, synthetic ones, and cuts of either.

Read are the Azure LLM inference traces (CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``), BurstGPT (CSV ``Timestamp,
…,Request tokens,Response tokens,…``) and Mooncake (JSON lines with ``timestamp`` in ms, ``input_length``,
``output_length``). Times are rebased so that the first request comes at 0 s; rows out of order are sorted.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

import numpy as np

from core.errors import Invalid, NotFound
from core.workload.arrivals import Arrival

TraceFormat = Literal["azure", "burstgpt", "mooncake"]
_COLUMNS: dict[TraceFormat, tuple[str, str, str]] = {
    "azure": ("timestamp", "contexttokens", "generatedtokens"),
    "burstgpt": ("timestamp", "request tokens", "response tokens"),
}
_KEYS = ("timestamp", "input_length", "output_length")
_MAX_TOKENS = 10_000_000


def read_trace(path: Path, kind: TraceFormat | None = None) -> list[Arrival]:
    """The requests of a trace file in order of time; `kind` None looks at the first line.

    BurstGPT marks a failed request by zero response tokens; those rows are left out. A byte-order mark and blank lines
    are ignored. Errors: `NotFound` when there is no such file; `Invalid` naming file, line, value and remedy for a row
    that cannot be used, a format that is not known, or a file without requests.
    """
    if not path.is_file():
        raise NotFound("no_trace", f"{path}: no such trace file; give the path of a CSV or JSONL file", "trace")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(file, path, kind))
    except UnicodeDecodeError as error:
        raise Invalid(
            "trace_not_text",
            f"{path}: byte {error.start} is not UTF-8 (a compressed file?); unpack it or convert it to UTF-8",
            "trace",
        ) from error
    if not rows:
        raise Invalid("trace_empty", f"{path}: no requests in it; give a trace with at least one row", "trace")
    rows.sort(key=lambda row: row.time_s)
    start = rows[0].time_s
    return [Arrival(row.time_s - start, row.input_tokens, row.output_tokens) for row in rows]


def synthetic(
    rate: float, seconds: float, input_tokens: float, output_tokens: float, *, cv: float = 1.0, seed: int = 0
) -> list[Arrival]:
    """Requests at `rate` per second for `seconds`, gaps drawn from a Gamma distribution whose coefficient of variation
    is `cv` (1: a Poisson process), lengths from exponential distributions of the given means, at least 1 token.

    Errors: `Invalid` for a rate, duration, mean or cv that is not above zero.
    """
    for name, value in (
        ("rate", rate), ("seconds", seconds), ("cv", cv), ("input_tokens", input_tokens),
        ("output_tokens", output_tokens),
    ):  # fmt: skip
        if not (math.isfinite(value) and value > 0):
            raise Invalid("trace_parameter", f"synthetic trace: {name} is {value}; give a number above zero", name)
    random = np.random.default_rng(seed)
    shape = 1.0 / cv**2
    arrivals: list[Arrival] = []
    now = 0.0
    while True:
        now += float(random.gamma(shape, 1.0 / (rate * shape)))
        if now >= seconds:
            return arrivals
        prompt, answer = random.exponential(input_tokens), random.exponential(output_tokens)
        arrivals.append(Arrival(now, max(1, round(prompt)), max(1, round(answer))))


def cut(arrivals: Sequence[Arrival], start_s: float, seconds: float) -> list[Arrival]:
    """The requests that come in `seconds` from `start_s` on, their times counted from `start_s`."""
    return [
        Arrival(a.time_s - start_s, a.input_tokens, a.output_tokens)
        for a in arrivals
        if start_s <= a.time_s < start_s + seconds
    ]


def thinned(arrivals: Sequence[Arrival], every: int) -> list[Arrival]:
    """Every `every`-th request: the same times and lengths at a fraction of the load.

    Errors: `Invalid` when `every` is below 1.
    """
    if every < 1:
        raise Invalid("trace_parameter", f"thinned trace: every is {every}; give 1 (all requests) or more", "every")
    return list(arrivals[::every])


def within(arrivals: Iterable[Arrival], max_tokens: int) -> list[Arrival]:
    """The requests whose prompt and answer together have at most `max_tokens` tokens."""
    return [a for a in arrivals if a.input_tokens + a.output_tokens <= max_tokens]


def _rows(lines: Iterable[str], path: Path, kind: TraceFormat | None) -> Iterator[Arrival]:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    number, first = next(numbered, (0, ""))
    if not first:
        return
    found = kind or _sniff(first, path, number)
    if found == "mooncake":
        yield from _mooncake(number, first, path)
        for number, line in numbered:
            yield from _mooncake(number, line, path)
        return
    header = [name.strip().lower() for name in next(csv.reader([first]))]
    names = _COLUMNS[found]
    missing = [name for name in names if name not in header]
    if missing:
        raise Invalid(
            "trace_columns",
            f"{path}, line {number}: no column {', '.join(missing)} in {first.strip()!r}; "
            f"{found} traces have the columns {', '.join(names)}",
            "trace",
        )
    places = [header.index(name) for name in names]
    for number, line in numbered:
        cells = next(csv.reader([line]))
        if len(cells) <= max(places):
            raise _bad(path, number, names[-1], line.strip(), f"the row has {len(cells)} cells, not {len(header)}")
        time, prompt, answer = (cells[place].strip() for place in places)
        if found == "burstgpt" and answer == "0":
            continue
        seconds = _seconds(time, found, path, number, names[0])
        yield Arrival(seconds, _tokens(prompt, path, number, names[1]), _tokens(answer, path, number, names[2]))


def _sniff(first: str, path: Path, number: int) -> TraceFormat:
    if first.lstrip().startswith("{"):
        return "mooncake"
    header = [name.strip().lower() for name in next(csv.reader([first]))]
    for kind, names in _COLUMNS.items():
        if all(name in header for name in names):
            return kind
    known = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in (*_COLUMNS.items(), ("mooncake", _KEYS)))
    raise Invalid(
        "trace_format",
        f"{path}, line {number}: {first.strip()[:120]!r} is not the head of a known trace; give one of {known}",
        "trace",
    )


def _mooncake(number: int, line: str, path: Path) -> Iterator[Arrival]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise _bad(path, number, "row", line.strip()[:120], f"not JSON ({error.msg})") from error
    if not isinstance(row, dict) or any(key not in row for key in _KEYS):
        raise _bad(path, number, "row", line.strip()[:120], f"not an object with {', '.join(_KEYS)}")
    yield Arrival(
        _number(row["timestamp"], path, number, "timestamp") / 1000.0,
        _tokens(row["input_length"], path, number, "input_length"),
        _tokens(row["output_length"], path, number, "output_length"),
    )


def _seconds(text: str, kind: TraceFormat, path: Path, number: int, field: str) -> float:
    if kind == "burstgpt":
        return _number(text, path, number, field)
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError as error:
        raise _bad(path, number, field, text, "not a time such as 2023-11-16 18:15:46.68") from error
    return (stamp.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()


def _number(value: object, path: Path, number: int, field: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        parsed = float(value)
    except ValueError as error:
        raise _bad(path, number, field, value, "not a number") from error
    if not math.isfinite(parsed) or parsed < 0:
        raise _bad(path, number, field, value, "not a number from 0 up")
    return parsed


def _tokens(value: object, path: Path, number: int, field: str) -> int:
    parsed = _number(value, path, number, field)
    if parsed != int(parsed) or not 1 <= parsed <= _MAX_TOKENS:
        raise _bad(path, number, field, value, f"not a whole number of tokens from 1 to {_MAX_TOKENS}")
    return int(parsed)


def _bad(path: Path, number: int, field: str, value: object, what: str) -> Invalid:
    where = f"{path}, line {number}: {field} is {value!r}"
    return Invalid("trace_row", f"{where}: {what}; correct or remove the row", "trace")
