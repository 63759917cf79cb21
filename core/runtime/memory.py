"""The broker at work: asks how the arena is used, lets `core.memory.broker` decide, and has it done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import torch

from core.link.messages import MemoryOwner, MemoryView
from core.memory.arena import Arena, ArenaFull, OutOfMemory
from core.memory.broker import Decision, FinetuneView, KvView, Ledger, Marks, decide, least_rows
from core.memory.share import JobShare

# Decisions are for pages, which come and go in milliseconds: not every step needs one.
_EVERY_S = 0.02
KV_OWNER = "kv cache"

Code = Literal["memory_granted", "memory_reclaimed", "kv_grows", "kv_shrinks"]
_WORDS: dict[Code, str] = {
    "memory_granted": "the job gets {:.1f} MiB",
    "memory_reclaimed": "the job gives up {:.1f} MiB",
    "kv_grows": "the KV cache grows by {:.1f} MiB",
    "kv_shrinks": "the KV cache shrinks by {:.1f} MiB",
}


class KvPool(Protocol):
    """What the broker needs of the elastic KV cache; tokens, but for `pages_of`."""

    @property
    def arena(self) -> Arena: ...
    @property
    def size(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def goal(self) -> int: ...
    @property
    def row_tokens(self) -> int: ...
    def rows_of(self, tokens: int) -> int: ...
    def slots_of(self, rows: int) -> int: ...
    def pages_of(self, tokens: int) -> int: ...
    def fewest(self) -> int: ...
    def resize(self, tokens: int) -> int: ...


class Broker:
    """Shares the arena out between the KV pool and at most one job. Belongs to the scheduler's thread, but for `share`.

    clock: monotonic seconds. `restart` and `stand_back` are what a job does for the KV cache: begin its micro-batch
    again, and leave with a checkpoint.
    """

    def __init__(self, kv: KvPool, marks: Marks | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._kv = kv
        self._marks = marks or Marks()
        self._clock = clock
        self._ledger = Ledger()
        self._share: JobShare | None = None
        self._looked_at = float("-inf")
        self._left = self._kv_and_spare()
        self._news: list[tuple[Code, str]] = []

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def share(self, job_id: str, state_bytes: int, parameters: Iterable[torch.Tensor]) -> JobShare:
        """The share of a job that is about to begin. Raises `OutOfMemory` when its state alone is more than a job can
        ever get. May be called from any thread."""
        kv, arena = self._kv, self._kv.arena
        always_kv = kv.pages_of(kv.slots_of(least_rows(kv.rows_of(kv.most), self._marks)))
        most = arena.statistics().capacity - always_kv
        share = JobShare(arena, f"job {job_id}", state_bytes, most, shared=parameters)
        if share.state > most:
            raise OutOfMemory(
                f"parameters and optimizer state take {share.state} pages, of which a job can get {most}"
            )
        self._share = share
        return share

    @property
    def waiting(self) -> str | None:
        """Why the job stands still; None when it need not."""
        share = self._share
        if share is None or not share.wanted:
            return None
        size = share.wanted * self._kv.arena.page_bytes / 2**20
        return f"waits for {size:.0f} MiB that the KV cache has"

    @property
    def due(self) -> bool:
        """The job is about to get what it waits for."""
        return self._share is not None and 0 < self._share.wanted <= self._spare()

    @property
    def room(self) -> tuple[int, float]:
        """For a policy: arena pages that KV cache and finetuning leave, and the KV tokens that a page would hold."""
        kv = self._kv
        taken = kv.pages_of(kv.size - kv.free)
        return max(0, self._left - taken), kv.row_tokens / kv.pages_of(kv.slots_of(1))

    # ---- step path ---------------------------------------------------------------------------------------------------

    def look(
        self,
        *,
        running: int,
        queued: int,
        step_ms: Callable[[], float | None],
        restart: Callable[[], None],
        stand_back: Callable[[], None],
    ) -> None:
        """Decide, if it is time; `queued`: prompt tokens that wait; `step_ms`: a step's ms, where they are known, asked
        for only then. Called between two steps."""
        now = self._clock()
        if now - self._looked_at < _EVERY_S:
            return
        self._looked_at = now
        if self._share is not None and self._share.closed:
            self._share = None
        decision, self._ledger = decide(
            self._kv_view(running, queued, step_ms()),
            self._finetune_view(),
            self._spare(),
            self._marks,
            self._ledger,
            now,
        )
        self._carry_out(decision, restart, stand_back)
        self._left = self._kv_and_spare()

    def _carry_out(self, decision: Decision, restart: Callable[[], None], stand_back: Callable[[], None]) -> None:
        kv, share = self._kv, self._share
        if share is not None and decision.drop_activations and share.activations:
            pages = share.activations
            restart()
            share.give_up_activations()
            self._note("memory_reclaimed", pages, decision.reason)
        if share is not None and decision.drop_job:
            stand_back()
        if decision.rows != kv.rows_of(kv.goal):
            before = kv.pages_of(kv.goal)
            pages = kv.pages_of(kv.resize(kv.slots_of(decision.rows))) - before
            if pages:
                self._note("kv_grows" if pages > 0 else "kv_shrinks", abs(pages), decision.reason)
        if share is not None and decision.grant:
            try:
                share.grant(decision.grant)
            except ArenaFull:
                return  # not unmapped yet
            self._note("memory_granted", decision.grant, decision.reason)

    # ---- views -------------------------------------------------------------------------------------------------------

    def _kv_view(self, running: int, queued: int, step_ms: float | None) -> KvView:
        kv, marks = self._kv, self._marks
        steps = marks.horizon_s * 1e3 / step_ms if step_ms else 0.0
        return KvView(
            rows=kv.rows_of(kv.goal),
            most=kv.rows_of(kv.most),
            fewest=kv.rows_of(kv.fewest()),
            row_tokens=kv.row_tokens,
            row_pages=kv.pages_of(kv.slots_of(1)),
            used=kv.size - kv.free,
            queued=queued,
            growth=round(running * steps),
        )

    def _finetune_view(self) -> FinetuneView:
        share = self._share
        if share is None:
            return FinetuneView()
        activations = share.activations
        return FinetuneView(True, share.wanted, share.held - activations, activations)

    def _spare(self) -> int:
        """Pages that nobody uses once the KV cache is as large as it is about to be."""
        return self._kv_and_spare() - self._kv.pages_of(self._kv.goal)

    def _kv_and_spare(self) -> int:
        """Pages that the KV cache has or could have: all but the job's and those that others hold."""
        said = self._kv.arena.statistics()
        others = said.used - next((one.pages for one in said.owners if one.name == KV_OWNER), 0)
        return said.capacity - said.lost - others

    def _note(self, code: Code, pages: int, reason: str) -> None:
        self._news.append((code, f"{_WORDS[code].format(pages * self._kv.arena.page_bytes / 2**20)}: {reason}"))

    def news(self) -> list[tuple[Code, str]]:
        """What changed hands since the last call, for people."""
        news, self._news = self._news, []
        return news

    def report(self) -> MemoryView:
        """Who holds what now."""
        said = self._kv.arena.statistics()
        page = said.page_bytes
        return MemoryView(
            page_bytes=page,
            capacity_bytes=said.capacity * page,
            used_bytes=said.used * page,
            high_water_bytes=said.high_water * page,
            kept_bytes=said.kept * page,
            owners=tuple(MemoryOwner(one.name, one.pages * page, one.high_water * page) for one in said.owners),
            kv_tokens=self._kv.size,
            kv_most_tokens=self._kv.most,
        )
