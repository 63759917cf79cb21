"""A finetune job's share of the arena: its state, which moves to host memory when the KV cache needs the pages, and its
activations, which are dropped.

Nothing is held at first. What is granted is mapped, and what is given up is unmapped, in a thread of the share's own;
the job stands still meanwhile (`ready`). The broker's thread gives the orders, the job looks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Event, RLock
from typing import Protocol

from core.memory.arena import ArenaFull
from core.memory.moment import Moment
from core.memory.rate import Rate
from core.memory.swap import Scratch, Swappable, paced

logger = logging.getLogger(__name__)


class Move:
    """An order that is carried out in the share's thread; the `Moment` at which it has been. Seconds of the share's
    clock, None before: `began_at`, when what it had to wait for was over, and `over_at`."""

    began_at: float | None = None
    over_at: float | None = None

    def __init__(self) -> None:
        self._over = Event()

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        self._over.wait()

    def end(self, now: float) -> None:
        """It has been carried out."""
        self.over_at = now
        self._over.set()


class Activations(Protocol):
    """What a job has between the forward and the backward of a micro-batch; pages.

    held: that it has, or may take without asking; promised: of these, those that it has not taken yet; needed: that it
    is known to take.
    """

    @property
    def held(self) -> int: ...
    @property
    def promised(self) -> int: ...
    @property
    def needed(self) -> int: ...
    def grant(self, pages: int) -> None:
        """So many more. Raises `ArenaFull` with nothing changed."""

    def give_up(self) -> None:
        """Give all of them back; nothing uses them any more."""


class GrowingActivations(Activations, Protocol):
    """Of a job whose need shows only when it computes."""

    def computing(self) -> AbstractContextManager[None]:
        """Around what the job computes. Raises `torch.OutOfMemoryError` when that takes more than was granted."""

    def ask(self) -> bool:
        """After that: need more from now on; False when there is no more for a job."""


class StaticActivations:
    """Those of a captured program: one block, all of it or nothing."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    @property
    def held(self) -> int:
        return self._scratch.mapped

    @property
    def promised(self) -> int:
        return 0

    @property
    def needed(self) -> int:
        return self._scratch.pages

    def grant(self, pages: int) -> None:
        if pages:
            self._scratch.map()

    def give_up(self) -> None:
        self._scratch.unmap()


class JobShare:
    """`state` and `activations` of one job. All but `ready`, `settle`, `check` and `close` belongs to the broker's
    thread; what it orders of a share that was closed meanwhile has been done."""

    def __init__(
        self,
        state: Swappable,
        activations: Activations,
        rate: Rate = Rate(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.state, self.activations = state, activations
        self.closed = False
        self._rate, self._clock = rate, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="harli-share")
        self._lock = RLock()  # of `closed`, and the orders until then
        self._move: Move | None = None
        self._after: Moment | None = None  # what the last order waits for, or has waited for
        self._goal = 0, 0  # pages of state and activations that it will have once all orders are carried out
        self._failure: Exception | None = None
        self.swapped_bytes = 0  # out and back, since the start

    # ---- figures -----------------------------------------------------------------------------------------------------

    @property
    def owner(self) -> str:
        """Its name in the arena's books."""
        return self.state.owner

    @property
    def held(self) -> int:
        """Pages that it has, or may take without asking."""
        return self.state.mapped + self.activations.held

    @property
    def promised(self) -> int:
        """Pages that were granted and are not taken yet: nobody else can have them."""
        on_the_way = max(0, sum(self._goal) - self.held) if self.moving else 0
        return on_the_way + self.activations.promised

    @property
    def takeable(self) -> tuple[int, int]:
        """Pages of state and of activations that it has or is about to have, and has no order to give up."""
        return self._goal if self.moving else (self.state.mapped, self.activations.held)

    @property
    def wanted(self) -> int:
        """Pages that have to be granted before the job can go on."""
        if self.closed or self.moving:
            return 0
        return self.state.pages - self.state.mapped + max(0, self.activations.needed - self.activations.held)

    @property
    def moving(self) -> bool:
        """Something is on its way, in or out."""
        return self._move is not None and not self._move.query()

    @property
    def under_way(self) -> Move | None:
        """The last order, as long as it has not been carried out."""
        return self._move if self.moving else None

    @property
    def ready(self) -> bool:
        """The job has what it is known to need, and may compute."""
        return not self.closed and not self.moving and not self.wanted

    # ---- orders ------------------------------------------------------------------------------------------------------

    def grant(self, pages: int) -> None:
        """Take all the pages that are wanted."""
        with self._lock:
            if self.closed:
                return
            activations = max(0, self.activations.needed - self.activations.held)
            goal = self.state.pages, self.activations.held + activations
            assert sum(goal) == self.held + pages

            def run() -> None:
                self.swapped_bytes += paced(self._arriving(), self._rate)
                if self._goal[1]:
                    self.activations.grant(activations)

            self._order(run, goal)

    def give_up_activations(self, after: Moment | None = None) -> Move:
        """Drop them, once what is queued is over (`after`); the job begins its micro-batch anew when they are back."""
        return self._order(self.activations.give_up, (self.takeable[0], 0), after)

    def give_up(self, after: Moment | None = None) -> list[Move]:
        """Drop the activations and move the state to host memory."""
        return [self.give_up_activations(after), self.swap_out(after)]

    def swap_out(self, after: Moment | None = None) -> Move:
        """Move the state to host memory, once what is queued is over: as fast as it goes, since requests may wait for
        it, where on its way back only the job does."""

        def run() -> None:
            self.swapped_bytes += self.state.out()

        return self._order(run, (0, self.takeable[1]), after)

    def close(self, after: Moment | None = None) -> None:
        """The job is over: give everything back, once what is queued is over."""

        def run() -> None:
            self.activations.give_up()
            self.state.forget()

        with self._lock:
            if not self.closed:
                self._order(run, (0, 0), after)
                self.closed = True
                self._thread.shutdown(wait=False)

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        if self._move is not None:
            self._move.synchronize()

    def check(self) -> None:
        """Raise what went wrong when something moved."""
        if self._failure is not None:
            raise self._failure

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _arriving(self) -> Iterator[int]:
        """The state's way back, as far as it is still to come: there may be an order by now that it leaves again."""
        for size in self.state.back():
            yield size
            if not self._goal[0]:
                return

    def _order(self, carry_out: Callable[[], None], goal: tuple[int, int], after: Moment | None = None) -> Move:
        move = Move()

        def run() -> None:
            try:
                if after is not None and (same is None or same.began_at is None):
                    after.synchronize()
                move.began_at = self._clock()
                carry_out()
            except ArenaFull as error:
                logger.info("a job waits on: %s", error)  # it is wanted again
            except Exception as error:
                logger.exception("memory of a job could not be moved")
                self._failure = error
            finally:
                move.end(self._clock())

        with self._lock:
            if self.closed:
                assert self._move is not None
                return self._move
            # An order before this one, not carried out yet, that waits for the same moment. To wait again for what has
            # passed costs a turn at Python, which may be milliseconds away where the engine's thread keeps it busy.
            same = self.under_way if after is self._after else None
            self._goal, self._after = goal, after
            self._move = move
            self._thread.submit(run)
        return move
