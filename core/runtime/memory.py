"""The broker at work: asks how the arena is used, lets `core.memory.broker` decide, and has it done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from core.link.messages import MemoryOwner, MemoryView
from core.memory.arena import Arena, OutOfMemory
from core.memory.broker import Decision, FinetuneView, KvView, Ledger, Marks, decide, least_rows
from core.memory.forecast import Arrivals
from core.memory.job_heap import JobHeap
from core.memory.metered import MeteredActivations, beyond
from core.memory.moment import Moment
from core.memory.rate import GPU_RATE, Rate
from core.memory.share import GrowingActivations, JobShare
from core.memory.swap import Scratch, Swappable
from core.memory.window import WindowedActivations
from core.runtime.reclaim import Reclaim

if TYPE_CHECKING:
    from core.memory._arena import OwnerUse
    from core.memory.slot import SlotMemory

# Decisions are for pages, which come and go in milliseconds: not every step needs one.
_EVERY_S = 0.02
# In a burst: to take up many requests takes tens of milliseconds, a look as good as none.
_BURST_S = 0.004
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
    @property
    def waiting(self) -> int:
        """Requests that are queued."""

    def rows_of(self, tokens: int) -> int: ...
    def slots_of(self, rows: int) -> int: ...
    def pages_of(self, tokens: int) -> int: ...
    def fewest(self) -> int: ...
    def asked(self) -> int:
        """That must be free before all requests that wait are taken up; 0 when none waits."""

    def short(self) -> tuple[Hashable, float] | None:
        """The first of the requests that wait which what is free does not do for, with those before it, and when it was
        queued, on the clock of `time.perf_counter`."""

    def waits(self, request: Hashable) -> bool:
        """Whether that one is still queued."""

    def growth(self, steps: float) -> int:
        """That running requests take in so many decode steps."""

    def arrived(self) -> Sequence[tuple[int, int]]:
        """(prompt, most that may follow) of each request that came since the last call."""

    def resize(self, tokens: int, after: Moment | None = None) -> int:
        """Answers what the size will be; `after`: when the pages for it are there."""


class Broker:
    """Shares the arena out between the KV pool and at most one job. Belongs to the scheduler's thread, but for `share`
    and `slot_share`.

    clock: monotonic seconds. `restart` is what a job does for the KV cache: it begins its micro-batch again, and
    answers when what it has queued is over.
    """

    def __init__(self, kv: KvPool, marks: Marks | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._kv = kv
        self._marks = marks or Marks()
        self._clock = clock
        self._ledger = Ledger()
        self._arrivals = Arrivals()
        self._share: JobShare | None = None
        self._change = threading.Lock()  # of the share for another, or none
        self._looked_at = self._fitted_at = float("-inf")  # the last look; the last at which all that waited fitted
        self._queue = 0  # requests that waited at the last look and still do, at most
        self._taking: list[Reclaim] = []  # whose pages are on their way out of the job
        self._following: list[Reclaim] = []  # of which the rest is yet to be seen
        self._reclaims = 0
        self._reclaim_ms: float | None = None  # of the last one
        self._left = self._kv_and_spare()
        self._news: list[tuple[Code, str]] = []

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def frozen(self, job_id: str) -> Scratch:
        """Where frozen weights of a job's own base may lie."""
        return Scratch(self._kv.arena, _owner(job_id))

    def share(
        self,
        job_id: str,
        state: Sequence[torch.Tensor],
        parameters: Iterable[torch.Tensor],
        frozen: Scratch | None = None,
    ) -> tuple[JobShare, GrowingActivations]:
        """The share of a job that is about to begin, with `state` as its content, and its activations as torch
        allocates them, with those of `frozen`. Raises `OutOfMemory` when its state alone is more than a job can ever
        get. Waits until the job before has left its own. May be called from any thread, but one at a time."""
        arena, owner = self._kv.arena, _owner(job_id)
        kept = Swappable(arena, owner, [(tuple(tensor.shape), tensor.dtype) for tensor in state])
        kept.put(state)
        ceiling = self._ceiling(kept, frozen.pages if frozen is not None else 0)
        activations: GrowingActivations
        if arena.device_id < 0:
            # What is trained moves to `kept`: where it was, something else may lie next.
            untrained = [parameter for parameter in parameters if not parameter.requires_grad]
            activations = MeteredActivations(arena, owner, ceiling, shared=[*untrained, *kept.tensors])
        else:
            activations = JobHeap(arena, owner, ceiling)
        if frozen is not None:
            activations = WindowedActivations(frozen, activations)
        return self._admit(JobShare(kept, activations, self.rate, self._clock)), activations

    def slot_share(self, slot: SlotMemory) -> JobShare:
        """`share` of a job in a captured slot. Raises `OutOfMemory` when the slot is more than a job can ever get."""
        ceiling = self._ceiling(slot.state)
        if slot.activations.needed > ceiling:
            raise OutOfMemory(
                f"the captured slot has activations of {slot.activations.needed * self._page_bytes / 2**20:.0f} MiB; "
                + beyond(ceiling * self._page_bytes)
            )
        return self._admit(JobShare(slot.state, slot.activations, self.rate, self._clock))

    @property
    def rate(self) -> Rate:
        """At which a job's memory is copied between host and device."""
        return GPU_RATE if self._kv.arena.device_id >= 0 else Rate()

    @property
    def most_bytes(self) -> int:
        """That a job can ever have."""
        return self._most_pages * self._page_bytes

    @property
    def _most_pages(self) -> int:
        kv = self._kv
        always_kv = kv.pages_of(kv.slots_of(least_rows(kv.rows_of(kv.most), self._marks)))
        return kv.arena.statistics().capacity - always_kv

    def _ceiling(self, state: Swappable, frozen: int = 0) -> int:
        """Pages that a job with this state, and so many of frozen weights, can ever have for its activations."""
        most = self._most_pages - frozen
        if state.pages > most:
            raise OutOfMemory(
                f"parameters and optimizer state take {state.pages} pages, of which a job can get {max(most, 0)}; "
                "lower the rank, or start the engine with a larger engine.max_total_tokens"
            )
        return most - state.pages

    def _admit(self, share: JobShare) -> JobShare:
        if (before := self._share) is not None:
            before.settle()  # or its pages would count as nobody's, or as those of this one
        with self._change:
            self._share = share
        return share

    @property
    def waiting(self) -> str | None:
        """Why the job stands still; None when it need not."""
        share = self._share
        if share is None or share.closed or share.ready:
            return None
        if share.moving:
            return "its memory is on its way"
        return f"waits for {share.wanted * self._page_bytes / 2**20:.0f} MiB that the KV cache has"

    @property
    def due(self) -> bool:
        """Something is on its way to the job or from it, or is about to be: a look will have something to do."""
        share = self._share
        return share is not None and (share.closed or share.moving or 0 < share.wanted <= self._spare())

    @property
    def pressed(self) -> bool:
        """Requests have come since the last look: the next one is not to be put off."""
        return self._kv.waiting > self._queue

    @property
    def waited_for(self) -> bool:
        """Requests wait, if only for a prefill."""
        return self._kv.waiting > 0

    @property
    def reclaiming(self) -> bool:
        """The KV cache waits for what the job gives up."""
        return any(not one.free for one in self._taking)

    @property
    def room(self) -> tuple[int, float]:
        """For a policy: arena pages that KV cache and finetuning leave, and the KV tokens that a page would hold."""
        kv = self._kv
        taken = kv.pages_of(kv.size - kv.free)
        return max(0, self._left - taken), kv.row_tokens / self._row_pages

    # ---- step path ---------------------------------------------------------------------------------------------------

    def batch_made(self) -> None:
        """The engine has taken up who it could of those that waited."""
        self._queue = min(self._queue, self._kv.waiting)
        self._follow()

    def request_came(self, *, step_ms: Callable[[], float | None], restart: Callable[[], Moment | None]) -> None:
        """A request was queued, and others may be before a batch is made: look now, so that those for which memory is
        short do not wait until all are. No batch is being made."""
        if self._clock() - self._looked_at >= _BURST_S:
            self.look(step_ms=step_ms, restart=restart)

    def look(self, *, step_ms: Callable[[], float | None], restart: Callable[[], Moment | None]) -> None:
        """Decide, if it is time; `step_ms`: a step's ms, where they are known, asked for only then. Called between two
        steps."""
        now = self._clock()
        if now - self._looked_at < _EVERY_S and not self.pressed:
            return
        self._looked_at, self._queue = now, self._kv.waiting
        share = self._share
        self._follow()
        if share is not None and share.closed and not share.moving:
            with self._change:
                if self._share is share:
                    self._share = None
        kv = self._kv_view(now, step_ms())
        self._note_fit(kv.queued)
        decision, self._ledger = decide(kv, self._finetune_view(), self._spare(), self._marks, self._ledger, now)
        self._carry_out(decision, restart)
        self._note_fit(kv.queued)
        self._left = self._kv_and_spare()

    def _note_fit(self, queued: int) -> None:
        """Who waits while there is room for all, there or on its way, waits for a prefill and not for a decision."""
        kv = self._kv
        if queued <= kv.free + max(0, kv.goal - kv.size):
            self._fitted_at = self._looked_at

    def _carry_out(self, decision: Decision, restart: Callable[[], Moment | None]) -> None:
        share = self._share
        if share is not None and (decision.drop_activations or decision.swap_out):
            self._take(share, decision, restart)
        else:
            self._resize(decision)
        if share is not None and decision.grant and self._free_now() >= decision.grant:
            share.grant(decision.grant)
            self._note("memory_granted", decision.grant, decision.reason)

    def _take(self, share: JobShare, decision: Decision, restart: Callable[[], Moment | None]) -> None:
        """Have the job give up what it is to, and the KV cache grow by that as soon as it is there."""
        kv = self._kv
        pages = sum(share.takeable) if decision.swap_out else share.takeable[1]
        short, queued = kv.short() or (None, self._looked_at)
        since = min(max(queued, self._fitted_at), self._looked_at)
        over = restart()
        self._note("memory_reclaimed", pages, decision.reason)
        # The orders come first: the pool grows once the last of them is carried out, by what has left.
        moves = share.give_up(over) if decision.swap_out else [share.give_up_activations(over)]
        self._resize(decision)
        self._taking.append(Reclaim(pages * self._page_bytes, since, self._looked_at, moves, kv.goal, short))

    def _follow(self) -> None:
        """See what became of reclaims since."""
        now, kv = self._clock(), self._kv
        for one in [one for one in self._taking if one.free]:
            self._taking.remove(one)
            self._following.append(one)
            self._reclaims += 1
            self._reclaim_ms = one.ms
        for one in list(self._following):
            if one.grown_at is None and kv.size >= min(one.tokens, kv.goal):
                one.grown_at = now
            if one.admitted_at is None and one.short is not None and not kv.waits(one.short):
                one.admitted_at = now
            if one.through:
                self._following.remove(one)
                self._news.append(("memory_reclaimed", str(one)))

    def _resize(self, decision: Decision) -> None:
        """Grow as far as there are pages, those that the job is about to give up included, or shrink."""
        kv = self._kv
        had, rows, spare = kv.rows_of(kv.goal), decision.rows, self._spare()
        before = kv.pages_of(kv.goal)
        while rows > had and kv.pages_of(kv.slots_of(rows)) - before > spare:
            rows -= 1
        if rows == had:
            return
        after = self._share.under_way if self._share is not None else None
        pages = kv.pages_of(kv.resize(kv.slots_of(rows), after)) - before
        if pages:
            self._note("kv_grows" if pages > 0 else "kv_shrinks", abs(pages), decision.reason)

    # ---- views -------------------------------------------------------------------------------------------------------

    def _kv_view(self, now: float, step_ms: float | None) -> KvView:
        kv, horizon_s = self._kv, self._marks.horizon_s
        steps = horizon_s * 1e3 / step_ms if step_ms else 0.0
        for prompt, most_new in kv.arrived():
            self._arrivals.see(now, prompt, most_new)
        most = kv.rows_of(kv.most)
        return KvView(
            rows=kv.rows_of(kv.goal),
            most=most,
            fewest=kv.rows_of(kv.fewest()),
            row_tokens=kv.row_tokens,
            row_pages=self._row_pages,
            last_pages=kv.pages_of(kv.most) - (kv.pages_of(kv.slots_of(most - 1)) if most > 1 else 0),
            used=kv.size - kv.free,
            queued=kv.asked(),
            growth=kv.growth(steps) + self._arrivals.tokens(now, horizon_s, steps),
        )

    def _finetune_view(self) -> FinetuneView:
        share = self._share
        if share is None or share.closed:
            return FinetuneView()
        state, activations = share.takeable
        return FinetuneView(True, share.wanted, state, activations)

    @property
    def _page_bytes(self) -> int:
        return self._kv.arena.page_bytes

    @property
    def _row_pages(self) -> int:
        """Pages of a row of the KV cache."""
        return self._kv.pages_of(self._kv.slots_of(1))

    def _spare(self) -> int:
        """Pages that nobody uses once the KV cache is as large as it is about to be."""
        return self._kv_and_spare() - self._kv.pages_of(self._kv.goal)

    def _kv_and_spare(self) -> int:
        """Pages that the KV cache has or could have: all but those that the job keeps and those that others hold."""
        said, share = self._kv.arena.statistics(), self._share
        of_others = said.used - _of(KV_OWNER, said.owners)
        if share is None:
            return said.capacity - said.lost - of_others
        return said.capacity - said.lost - (of_others - _of(share.owner, said.owners)) - sum(share.takeable)

    def _free_now(self) -> int:
        """Pages that nobody uses and nobody is about to."""
        said = self._kv.arena.statistics()
        growing = max(0, self._kv.pages_of(self._kv.goal) - _of(KV_OWNER, said.owners))
        promised = self._share.promised if self._share is not None else 0
        return said.capacity - said.lost - said.used - growing - promised

    def _note(self, code: Code, pages: int, reason: str) -> None:
        self._news.append((code, f"{_WORDS[code].format(pages * self._page_bytes / 2**20)}: {reason}"))

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
            reclaims=self._reclaims,
            reclaim_ms=self._reclaim_ms,
        )


def _owner(job_id: str) -> str:
    return f"job {job_id}"


def _of(name: str, owners: Iterable[OwnerUse]) -> int:
    return next((one.pages for one in owners if one.name == name), 0)
