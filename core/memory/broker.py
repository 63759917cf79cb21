"""Who gets the arena's pages: decisions only, no clock, no arena, no I/O.

The KV cache has priority. Its free tokens, less what is queued and what the running requests and the arrivals will take
before memory could be had back, are kept between two marks: below the low one it grows to the high one, at the cost of
finetuning if need be, first spare pages, then the activations of the running micro-batch (which starts again), then the
job's state, which moves to host memory. Finetuning gets pages only where the KV cache stays above the high mark without
them, and not soon after it had to give some up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil


@dataclass(frozen=True, slots=True)
class Marks:
    """Shares of the full KV pool. low, high: of free tokens; least: what finetuning can never take. horizon_s: how far
    the forecast looks, calm_s: how long after the KV cache had to grow nothing is taken from it."""

    low: float = 0.05
    high: float = 0.15
    least: float = 0.25
    horizon_s: float = 1.0
    calm_s: float = 3.0


@dataclass(frozen=True, slots=True)
class KvView:
    """The KV pool, in rows of `row_tokens` tokens and `row_pages` pages (the last one: `last_pages`), and its load.

    rows: those that it has or is about to have; most: of the full pool; fewest: what requests at hand need. Tokens:
    `used` held and not evictable, `queued` that must be free before all requests that wait are taken up, `growth` that
    the requests running and arriving will take within the horizon.
    """

    rows: int
    most: int
    fewest: int
    row_tokens: int
    row_pages: int
    last_pages: int
    used: int
    queued: int
    growth: int

    def reach(self, pages: int) -> int:
        """Rows that the pool could have with `pages` more."""
        if pages >= (self.most - self.rows - 1) * self.row_pages + self.last_pages:
            return self.most
        return min(max(self.rows, self.most - 1), self.rows + pages // self.row_pages)


@dataclass(frozen=True, slots=True)
class FinetuneView:
    """Pages: `wanted` for a job to go on (0: it has what it needs, or there is none), `state` and `activations` that it
    holds and could give up; `present`: there is a job."""

    present: bool = False
    wanted: int = 0
    state: int = 0
    activations: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the broker remembers: when, in seconds, the KV cache last had to grow."""

    grown_at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Decision:
    """rows: of the KV pool, once the pages for it are there; grant: pages for the job (all that it wants, or none);
    drop_activations, swap_out: what finetuning gives up; reason: for people, empty when nothing changes."""

    rows: int
    grant: int = 0
    drop_activations: bool = False
    swap_out: bool = False
    reason: str = ""


def decide(
    kv: KvView, finetune: FinetuneView, spare: int, marks: Marks, ledger: Ledger, now: float
) -> tuple[Decision, Ledger]:
    """The decision at `now` (seconds) with `spare` pages that nobody uses."""
    full = kv.most * kv.row_tokens
    need = kv.used + max(kv.queued, kv.growth)
    floor = max(kv.fewest, least_rows(kv.most, marks))
    ample = min(kv.most, max(floor, _rows(need + round(marks.high * full), kv)))
    short = kv.rows < kv.most and (kv.rows < kv.fewest or kv.rows * kv.row_tokens - need < marks.low * full)
    if short:
        return _grow(kv, finetune, spare, max(kv.rows, ample)), replace(ledger, grown_at=now)
    if not finetune.present:
        # Nobody else has a use for the pages: the prefix cache does.
        rows = kv.reach(spare)
        return Decision(rows, reason="no job" if rows != kv.rows else ""), ledger
    if finetune.wanted == 0:
        return Decision(kv.rows), ledger
    if finetune.wanted <= spare:
        return Decision(kv.rows, grant=finetune.wanted, reason="spare pages"), ledger
    rows = kv.rows - -(-(finetune.wanted - spare) // kv.row_pages)
    if rows >= ample and now - ledger.grown_at >= marks.calm_s:
        return Decision(rows, reason="finetuning needs memory that the KV cache does not"), ledger
    return Decision(kv.rows), ledger


def least_rows(most: int, marks: Marks) -> int:
    """Rows of a full pool of `most` that finetuning can never take."""
    return ceil(marks.least * most)


def _grow(kv: KvView, finetune: FinetuneView, spare: int, rows: int) -> Decision:
    """As many of the rows as can be had, for as little of what finetuning holds as that takes."""

    def reach(pages: int) -> int:
        return min(rows, kv.reach(pages))

    with_activations = spare + finetune.activations
    reached = reach(with_activations + finetune.state)
    if reach(spare) == reached:
        return Decision(reached, reason="the KV cache runs short; spare pages" if reached > kv.rows else "")
    if reach(with_activations) == reached:
        return Decision(reached, drop_activations=True, reason="the KV cache runs short; the micro-batch is dropped")
    return Decision(
        reached,
        drop_activations=finetune.activations > 0,
        swap_out=True,
        reason="the KV cache runs short; the job's state moves to host memory",
    )


def _rows(tokens: int, kv: KvView) -> int:
    return -(-tokens // kv.row_tokens)
