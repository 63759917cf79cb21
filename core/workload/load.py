"""Open-loop load on an OpenAI-compatible endpoint: requests are sent when the trace says, however slow the answers are.

Definitions: TTFT runs from sending a request to its first token; a gap (ITL) lies between two tokens that follow each
other, so TTFT is none; TPOT of a request is (last − first token) / (tokens − 1). Percentiles are of the raw values.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import httpx
import msgspec
import numpy as np

from core.workload.arrivals import Arrival

WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True, slots=True)
class Result:
    """One request. Times in ms; `start_s` since the replay's start, `lag_ms` how much later than planned it was sent.

    `tokens`: completion tokens as the server counts them, else pieces of text received. `gaps_ms`: between pieces of
    text that follow each other. `error` is None when the answer ended as it should.
    """

    arrival: Arrival
    model: str
    start_s: float
    lag_ms: float
    ttft_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()
    tokens: int = 0
    end_s: float = 0.0
    error: str | None = None

    @property
    def tpot_ms(self) -> float | None:
        return sum(self.gaps_ms) / (self.tokens - 1) if self.tokens > 1 and self.gaps_ms else None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of raw values in ms, each one that occurred (nearest rank); None without values."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a replay. `errors` counts failed requests by what went wrong."""

    requests: int
    seconds: float
    tokens_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles
    lag_ms: Percentiles
    errors: dict[str, int] = field(default_factory=dict)


async def replay(
    arrivals: Sequence[Arrival],
    url: str,
    models: Sequence[str],
    prompts: Sequence[str],
    *,
    speed: float = 1.0,
    ignore_eos: bool = False,
    seed: int = 0,
    timeout_s: float = 600.0,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Send every arrival at its time (divided by `speed`) to ``{url}/v1/chat/completions``, streaming.

    Each request goes to one of the models and carries a text made of the prompts that has about `input_tokens` tokens,
    both drawn by `seed`; its answer is limited to `output_tokens` (exactly these with `ignore_eos`). The number of
    requests under way is never limited. `on_result` is called as each ends. Returns the results in the order of the
    arrivals; a failed request is a result with `error`. Cancelling the call drops the requests under way.
    """
    random = Random(seed)
    asked = [(random.choice(models), fit(prompts, arrival.input_tokens, random)) for arrival in arrivals]
    # A connection is not kept as long as the engine keeps it, 5 s: it may be closed while a request is on its way.
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=2.0)
    timeout = httpx.Timeout(timeout_s, connect=10.0, pool=None)
    async with httpx.AsyncClient(base_url=url, limits=unlimited, timeout=timeout) as client:
        begun = time.perf_counter()

        async def send(arrival: Arrival, model: str, prompt: str) -> Result:
            planned = begun + arrival.time_s / speed
            await asyncio.sleep(max(planned - time.perf_counter(), 0.0))
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": arrival.output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": ignore_eos,
            }
            result = await _request(client, body, arrival, begun=begun, planned=planned)
            if on_result:
                on_result(result)
            return result

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(arrival, *what)) for arrival, what in zip(arrivals, asked, strict=True)]
    return [task.result() for task in tasks]


async def _request(
    client: httpx.AsyncClient, body: dict[str, object], arrival: Arrival, *, begun: float, planned: float
) -> Result:
    sent = time.perf_counter()
    times: list[float] = []
    tokens, error = 0, None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                error = f"HTTP {response.status_code}: {text[:200]}"
            else:
                async for at, piece in _pieces(response):
                    if isinstance(piece, int):
                        tokens = piece
                    else:
                        times.append(at)
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    except _StreamError as failure:
        error = str(failure)
    return Result(
        arrival=arrival,
        model=str(body["model"]),
        start_s=sent - begun,
        lag_ms=(sent - planned) * 1e3,
        ttft_ms=(times[0] - sent) * 1e3 if times else None,
        gaps_ms=tuple((np.diff(times) * 1e3).tolist()),
        tokens=tokens or len(times),
        end_s=time.perf_counter() - begun,
        error=error,
    )


class _StreamError(Exception):
    """The stream says that something went wrong, or ends before it is complete."""


async def _pieces(response: httpx.Response) -> AsyncIterator[tuple[float, str | int]]:
    """(moment, piece of text) of the server-sent events, and at last the number of tokens that the server counted."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        at, data = time.perf_counter(), line[5:].strip()
        if data == "[DONE]":
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            raise _StreamError(f"error in the stream: {event['error']}"[:200])
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            if text := delta.get("content") or delta.get("reasoning_content"):
                yield at, text
        if usage := event.get("usage"):
            yield at, int(usage["completion_tokens"])
    raise _StreamError("the stream ended before [DONE]")


def fit(prompts: Sequence[str], tokens: int, random: Random) -> str:
    """A text of about `tokens` tokens: the prompt of the nearest length (one of several that are about as near), or
    several in a row when all are shorter."""
    words = max(round(tokens * WORDS_PER_TOKEN), 1)
    lengths = [len(prompt.split()) for prompt in prompts]
    nearest = min(abs(length - words) for length in lengths)
    if words <= max(lengths) or nearest <= words // 4:
        return random.choice(
            [p for p, length in zip(prompts, lengths, strict=True) if abs(length - words) <= nearest + 1]
        )
    text: list[str] = []
    while len(text) < words:
        text += random.choice(prompts).split()
    return " ".join(text[:words])


def summarise(results: Sequence[Result]) -> Summary:
    """The figures of a replay's results. Latencies are of requests that ended well."""
    good = [result for result in results if result.error is None]
    seconds = max((result.end_s for result in results), default=0.0) - min((r.start_s for r in results), default=0.0)
    return Summary(
        requests=len(results),
        seconds=seconds,
        tokens_s=sum(result.tokens for result in results) / seconds if seconds else 0.0,
        ttft_ms=percentiles([result.ttft_ms for result in good if result.ttft_ms is not None]),
        itl_ms=percentiles([gap for result in good for gap in result.gaps_ms]),
        tpot_ms=percentiles([result.tpot_ms for result in good if result.tpot_ms is not None]),
        lag_ms=percentiles([result.lag_ms for result in results]),
        errors=dict(Counter(result.error for result in results if result.error is not None)),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Nearest-rank percentiles of raw values."""
    if not values:
        return Percentiles(0)
    p50, p90, p99 = (float(value) for value in np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf"))
    return Percentiles(len(values), p50, p90, p99, max(values))
