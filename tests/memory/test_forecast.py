"""The forecast of arrivals, and what it is for: no request waits for memory that finetuning holds longer than it takes
to get it back."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.memory.broker import FinetuneView, KvView, Ledger, Marks, decide
from core.memory.forecast import WINDOW_S, Arrivals


def seen(arrivals: list[tuple[float, int, int]]) -> Arrivals:
    made = Arrivals()
    for one in sorted(arrivals):
        made.see(*one)
    return made


def test_nothing_came_and_nothing_is_expected() -> None:
    assert Arrivals().tokens(5.0, 1.0, 10) == 0
    old = seen([(0.0, 500, 100)])
    assert old.tokens(WINDOW_S - 0.1, 1.0, 10) > 0 and old.tokens(WINDOW_S, 1.0, 10) == 0


def test_a_steady_stream_is_expected_to_go_on() -> None:
    stream = seen([(n / 10, 200, 1000) for n in range(100)])
    assert 10 * 220 < stream.tokens(9.95, 1.0, 20) < 1.5 * 10 * 220
    short = seen([(n / 10, 200, 5) for n in range(100)])
    assert short.tokens(9.95, 1.0, 20) < stream.tokens(9.95, 1.0, 20), "those that end early take no more"


requests = st.lists(st.tuples(st.floats(0, 9), st.integers(1, 4000), st.integers(0, 4000)), max_size=30)


@given(requests, st.tuples(st.floats(0, 9), st.integers(1, 4000), st.integers(0, 4000)), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_one_more_or_a_longer_horizon_is_never_expected_to_take_less(
    before: list[tuple[float, int, int]], more: tuple[float, int, int], steps: int
) -> None:
    fewer, plus = seen(before), seen([*before, more])
    assert fewer.tokens(9.0, 1.0, steps) <= plus.tokens(9.0, 1.0, steps)
    expected = [plus.tokens(9.0, horizon, steps) for horizon in (0.1, 0.5, 1.0, 2.0)]
    assert all(one <= two for one, two in pairwise(expected))
    assert fewer.tokens(9.0, 1.0, steps) <= fewer.tokens(9.0, 1.0, steps + 10)


# ---- the loop --------------------------------------------------------------------------------------------------------

TICK_MS, STEP_MS, LOOK_MS = 5, 25, 20
ROW, MOST, ROW_PAGES = 100, 40, 6


@dataclass
class Request:
    prompt: int
    most_new: int
    done: int = 0

    @property
    def ahead(self) -> int:
        return self.most_new - self.done


@dataclass
class Engine:
    """Admits as SGLang does: a request is taken up when all that it and the running ones may yet get is free. A job's
    memory is there `delay_ms` after it was asked for: what is queued on the device, and the unmapping."""

    delay_ms: int
    activations: int
    state: int
    wanted: int = 0
    rows: int = 10
    now: int = 0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    leaving: list[tuple[int, int]] = field(default_factory=list)  # (from when, pages)
    expecting: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    arrivals: Arrivals = field(default_factory=Arrivals)
    held_up_ms: int = 0  # how long the first in the queue has waited for what finetuning holds
    longest_ms: int = 0

    @property
    def capacity(self) -> int:
        return MOST * ROW_PAGES

    @property
    def of_job(self) -> int:
        return self.activations + self.state + sum(pages for _, pages in self.leaving)

    @property
    def spare(self) -> int:
        return self.capacity - self.rows * ROW_PAGES - self.of_job

    @property
    def used(self) -> int:
        return sum(one.prompt + one.done for one in self.running)

    def asked(self) -> int:
        queued = sum(one.prompt + one.most_new for one in self.waiting)
        return queued + sum(one.ahead for one in self.running) if self.waiting else 0

    def fits(self, rows: int) -> bool:
        """Whether the first in the queue would be taken up by a pool of so many rows."""
        first = self.waiting[0]
        return self.used + sum(one.ahead for one in self.running) + first.prompt + first.most_new <= rows * ROW

    def tick(self, arriving: list[Request]) -> None:
        for one in arriving:
            self.waiting.append(one)
            self.arrivals.see(self.now / 1e3, one.prompt, one.most_new)
        self.leaving = [(when, pages) for when, pages in self.leaving if when > self.now]
        if self.now % LOOK_MS == 0 or self.expecting:
            self.expecting = bool(self.leaving)
            self.look()
        while self.waiting and self.fits(self.rows):
            self.running.append(self.waiting.pop(0))
            self.held_up_ms = 0
        without_job = self.rows + (self.of_job + self.spare) // ROW_PAGES
        held_up = bool(self.waiting) and self.of_job > 0 and self.fits(min(MOST, without_job))
        self.held_up_ms = self.held_up_ms + TICK_MS if held_up else 0
        self.longest_ms = max(self.longest_ms, self.held_up_ms)
        if self.now % STEP_MS == 0:
            for one in self.running:
                one.done += 1
            self.running = [one for one in self.running if one.ahead > 0]
        self.now += TICK_MS

    def look(self) -> None:
        steps = 1e3 / STEP_MS
        needs = [one.prompt + one.most_new for one in (*self.running, *self.waiting)]
        kv = KvView(
            rows=self.rows, most=MOST, fewest=-(-max(needs, default=0) // ROW), row_tokens=ROW, row_pages=ROW_PAGES,
            last_pages=ROW_PAGES, used=self.used, queued=self.asked(),
            growth=sum(min(int(steps), one.ahead) for one in self.running)
            + self.arrivals.tokens(self.now / 1e3, 1.0, steps),
        )  # fmt: skip
        finetune = FinetuneView(True, 0 if self.leaving else self.wanted, self.state, self.activations)
        said, self.ledger = decide(kv, finetune, self.spare, Marks(), self.ledger, self.now / 1e3)
        if said.drop_activations:
            self.give_up(self.activations)
            self.activations = 0
        if said.swap_out:
            self.give_up(self.state)
            self.state = 0
        if said.rows < self.rows or said.rows > self.rows:
            self.rows = min(said.rows, self.rows + self.spare // ROW_PAGES)
        if said.grant:
            self.activations, self.wanted = self.activations + said.grant, 0
        assert self.rows * ROW_PAGES + self.of_job <= self.capacity

    def give_up(self, pages: int) -> None:
        self.leaving.append((self.now + self.delay_ms, pages))
        self.wanted += pages
        self.expecting = True


arriving = st.tuples(st.integers(0, 1500), st.integers(1, 1500), st.integers(1, 1500))


@given(
    load=st.lists(arriving, min_size=1, max_size=25),
    delay_ms=st.sampled_from([0, 5, 40, 60, 150]),
    activations=st.integers(0, 150),
    state=st.integers(0, 30),
)
@example(load=[(0, 900, 20), (5, 900, 20), (10, 900, 1400)], delay_ms=60, activations=150, state=30)
@settings(max_examples=60, deadline=None)
def test_no_request_waits_for_what_finetuning_holds_longer_than_it_takes_to_get_it_back(
    load: list[tuple[int, int, int]], delay_ms: int, activations: int, state: int
) -> None:
    engine = Engine(delay_ms, activations, state)
    due = sorted(load)
    while engine.now < 2500:
        fresh = [Request(prompt, most_new) for at, prompt, most_new in due if at // TICK_MS * TICK_MS == engine.now]
        engine.tick(fresh)
    assert engine.longest_ms <= delay_ms + LOOK_MS + TICK_MS


def test_with_a_forecast_only_the_first_of_several_bursts_waits() -> None:
    waits = []
    for forecast in (True, False):
        engine = Engine(delay_ms=60, activations=150, state=30)
        if not forecast:
            engine.arrivals.tokens = lambda *_: 0  # type: ignore[method-assign,assignment]
        bursts = set()
        for tick in range(4000):
            engine.tick([Request(700, 20), Request(700, 20)] if tick % 800 == 0 else [])
            if engine.waiting:
                bursts.add(tick // 800)
        waits.append(len(bursts))
    assert waits == [1, 5]
