"""The arena: pages come and go behind fixed addresses, each counted to an owner, never more than there are."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import Unavailable
from core.memory import _arena
from core.memory.arena import (
    CPU_PAGE_BYTES,
    Arena,
    ArenaError,
    ArenaFull,
    Claim,
    OutOfMemory,
    Region,
    open_arena,
    out_of_memory,
    pages_of,
    view,
)

PAGE = 4096
CAPACITY = 24
PAGES = 12


def small(capacity: int = CAPACITY) -> Arena:
    return _arena.memfd_arena(PAGE, capacity)


def used_by(arena: Arena, owner: str) -> int:
    return next((use.pages for use in arena.statistics().owners if use.name == owner), 0)


def words(arena: Arena, region: Region) -> torch.Tensor:
    """The region as (pages, words of a page)."""
    return view(arena, region, (region.pages, PAGE // 8), torch.int64)


def test_content_stays_while_other_pages_come_and_go() -> None:
    arena = small()
    region = arena.reserve("kv", 8)
    region.map(0, 8)
    content = words(arena, region)
    content[:] = torch.arange(8)[:, None]
    address = content.data_ptr()
    for _ in range(5):
        region.unmap(2, 4)
        arena.reserve("job", 4).map(0, 4)
        region.map(2, 4)
        assert content.data_ptr() == address
        assert content[[0, 1, 6, 7]].unique().tolist() == [0, 1, 6, 7]


def test_a_tensor_keeps_its_region_alive() -> None:
    arena = small()
    region = arena.reserve("kv", 2)
    region.map(0, 2)
    content = words(arena, region)
    del region
    gc.collect()
    assert used_by(arena, "kv") == 2
    narrower = content[1:].flatten()
    del content
    gc.collect()
    narrower[:] = 7
    assert int(narrower.sum()) == 7 * PAGE // 8
    del narrower
    gc.collect()
    assert arena.statistics().used == 0


def test_what_is_refused_changes_nothing() -> None:
    arena = small()
    region, other = arena.reserve("kv", 8), arena.reserve("job", CAPACITY)
    region.map(2, 3)
    for refused, call in (
        ("page 4 is mapped already", lambda: region.map(4, 2)),
        ("page 5 is not mapped", lambda: region.unmap(4, 2)),
        ("cannot map pages 7 to 9 of a region of 8", lambda: region.map(7, 2)),
        ("cannot unmap pages 9 to 9", lambda: region.unmap(9, 0)),
        ("of a region of 32768", lambda: view(arena, region, (PAGE + 1,), torch.int64)),
        ("a region of no pages", lambda: arena.reserve("job", 0)),
        ("job asks for 22 pages of 4096 bytes; 21 of 24 are free", lambda: other.map(0, 22)),
        ("job asks for 22 pages", lambda: arena.claim("job", 22)),
    ):
        with pytest.raises(ArenaError, match=refused):
            call()
        assert (region.mapped, other.mapped, arena.statistics().used) == (3, 0, 3)
    other.map(0, 21)


def test_a_full_arena_is_an_out_of_memory_error_to_a_job() -> None:
    arena = small()
    with pytest.raises(torch.OutOfMemoryError, match="25 pages"), out_of_memory():
        arena.claim("job", CAPACITY + 1)
    assert issubclass(OutOfMemory, torch.OutOfMemoryError)
    with pytest.raises(ArenaFull):
        arena.claim("job", CAPACITY + 1)


def test_claims_count_without_an_address_and_push_kept_pages_out() -> None:
    arena = small()
    region = arena.reserve("kv", CAPACITY)
    region.map(0, CAPACITY)
    region.unmap(4, CAPACITY - 4)
    assert arena.statistics().kept == CAPACITY - 4
    claim = arena.claim("job", 10)
    assert arena.statistics().kept == CAPACITY - 14
    claim.resize(3)
    with pytest.raises(ArenaFull):
        claim.resize(CAPACITY - 3)
    assert claim.pages == used_by(arena, "job") == 3
    del claim
    assert used_by(arena, "job") == 0


def test_pages_are_made_once_and_reused() -> None:
    arena = small()
    region = arena.reserve("kv", 8)
    for _ in range(10):
        region.map(0, 8)
        region.unmap(0, 8)
    said = arena.statistics()
    assert (said.created, said.in_place, said.mapped, said.unmapped, said.kept) == (8, 72, 80, 80, 8)
    assert arena.trim() == 8
    assert arena.statistics().kept == 0


def test_pages_that_go_to_and_fro_stay_behind_the_addresses_of_both() -> None:
    arena = small(8)
    kv, job = arena.reserve("kv", 8), arena.reserve("job", 5)
    kv.map(0, 8)
    for turn in range(3):
        kv.unmap(2, 6)
        job.map(0, 5)
        words(arena, job).fill_(turn)
        job.unmap(0, 5)
        kv.map(2, 6)
        assert (words(arena, kv)[2:] == turn).all(dim=1).sum() >= 5
        assert arena.statistics().in_place == 6 + 11 * turn
    assert arena.statistics().created == 8


@pytest.mark.parametrize("given_back", [False, True])
def test_to_touch_what_was_given_back_ends_the_process(given_back: bool) -> None:
    """On a CPU, where it costs little to have it so; also while the page is still behind the address."""
    program = f"""
from core.memory import _arena
arena = _arena.memfd_arena({PAGE}, 4)
region = arena.reserve("kv", 2)
region.map(0, 2)
content = region.bytes(0, {2 * PAGE}, -1)
region.unmap(1, 1)
if not {given_back}:
    region.map(1, 1)
content.fill_(1)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == (-signal.SIGSEGV if given_back else 0)


def test_others_run_while_a_regions_pages_are_taken_away() -> None:
    """Each second page, so that it takes thousands of calls; to put them there is one of those that let others run."""
    arena = small(20_000)
    region, counted, over = arena.reserve("job", 20_000), [0], threading.Event()
    for page in range(0, 20_000, 2):
        region.map(page, 1)

    def count() -> None:
        while not over.is_set():
            counted[0] += 1
            time.sleep(1e-4)

    thread = threading.Thread(target=count)
    thread.start()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # nobody is made to give way
    try:
        before = counted[0]
        del region
        after = counted[0]
    finally:
        sys.setswitchinterval(switch)
        over.set()
        thread.join()
    assert after > before and arena.statistics().used == 0


def test_high_water_marks_stay() -> None:
    arena = small()
    kv, job = arena.reserve("kv", 8), arena.reserve("job", 8)
    kv.map(0, 8)
    kv.unmap(0, 6)
    job.map(0, 5)
    assert {use.name: (use.pages, use.high_water) for use in arena.statistics().owners} == {"kv": (2, 8), "job": (5, 5)}
    assert arena.statistics().high_water == 8


def test_a_machine_without_a_driver_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(Unavailable, match=r"no CUDA driver: libcuda\.so\.1"):
        open_arena(torch.device("cuda", 0), 2**30)


def test_windows_move_to_the_hosts_memory_and_back_in_one_call() -> None:
    arena = small()
    region = arena.reserve("job", 8)
    region.map(0, 8)
    content = words(arena, region)
    content[:] = torch.arange(8)[:, None] + 1
    host = torch.zeros((8, PAGE // 8), dtype=torch.int64)
    at = [(first, 2, host[first].data_ptr()) for first in (6, 2)]
    region.move_out(at)
    assert [region.is_mapped(page) for page in range(8)] == [True, True, False, False, True, True, False, False]
    assert host[:, 0].tolist() == host[:, -1].tolist() == [0, 0, 3, 4, 0, 0, 7, 8]
    other = arena.reserve("kv", 20)
    other.map(0, 20)
    words(arena, other).fill_(9)
    other.unmap(0, 20)
    region.move_in([at[0], (2, 2, 0)])
    assert content[:, 0].tolist() == content[:, -1].tolist() == [1, 2, 0, 0, 5, 6, 7, 8]


def test_a_move_in_goes_as_far_as_it_can_and_a_move_out_all_the_way_or_not_at_all() -> None:
    arena = small()
    region, other = arena.reserve("job", 8), arena.reserve("kv", CAPACITY)
    host = torch.ones((8, PAGE // 8), dtype=torch.int64)
    at = [(first, 2, host[first].data_ptr()) for first in (0, 2, 4, 6)]
    other.map(0, CAPACITY - 5)
    with pytest.raises(ArenaFull, match="job asks for 2 pages of 4096 bytes; 1 of 24 are free"):
        region.move_in(at)
    assert (region.mapped, arena.statistics().used) == (4, CAPACITY - 1)
    with pytest.raises(ArenaError, match="page 4 is not mapped"):
        region.move_out(at)
    assert (region.mapped, arena.statistics().used) == (4, CAPACITY - 1)
    region.move_out(at[:2])
    assert (region.mapped, arena.statistics().used) == (0, CAPACITY - 5)
    region.move_in(at[3:])
    for call in (region.move_in, region.move_out):
        with pytest.raises(ArenaError, match="of a region of 8"):
            call([(7, 2, host.data_ptr())])
    assert region.mapped == 2


def test_threads_map_while_others_read_figures() -> None:
    arena = small(64)

    def churn(seed: int) -> None:
        draw = random.Random(seed)
        region = arena.reserve(f"thread {seed}", 16)
        for _ in range(2000):
            first = draw.randrange(16)
            count = draw.randrange(16 - first) + 1
            try:
                (region.map if draw.random() < 0.5 else region.unmap)(first, count)
            except ArenaError:
                assert arena.statistics().used <= 64

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert arena.statistics().used == 0


def test_a_million_random_operations_keep_the_books() -> None:
    """Each operation is compared with a model of bit masks: whether it is allowed, and the pages in use after it."""
    draw = random.Random(11)
    capacity = 3 * PAGES
    arena = small(capacity)
    regions = [arena.reserve("even" if n % 2 == 0 else "odd", PAGES) for n in range(4)]
    masks = [0] * 4
    claim, claimed, used = arena.claim("claim", 0), 0, 0
    shapes = [(first, count, ((1 << count) - 1) << first) for count in (1, 2, 3) for first in range(PAGES - count + 1)]
    chosen = draw.choices(range(len(shapes)), k=1_000_000)
    kinds = draw.choices(range(9), k=1_000_000)
    for number, (shape, kind) in enumerate(zip(chosen, kinds, strict=True)):
        which = number & 3
        first, count, run = shapes[shape]
        mask = masks[which]
        if kind == 8:
            fits = used - claimed + count <= capacity
        elif kind < 4:
            fits = not mask & run and used + count <= capacity
        else:
            fits = mask & run == run
        try:
            if kind == 8:
                claim.resize(count)
                used, claimed = used - claimed + count, count
            elif kind < 4:
                regions[which].map(first, count)
                masks[which], used = mask | run, used + count
            else:
                regions[which].unmap(first, count)
                masks[which], used = mask & ~run, used - count
        except ArenaError:
            assert not fits
        else:
            assert fits
        if number % 1000 == 0:
            said = arena.statistics()
            assert said.used == used and said.kept + used <= capacity
            assert [region.mapped for region in regions] == [mask.bit_count() for mask in masks]
    assert arena.statistics().mapped > 200_000


class Model(RuleBasedStateMachine):
    """Any order of operations, with what is written in the pages; regions, claims and the arena go in any order too."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[int, Region] = {}
        self.pages: dict[int, dict[int, int]] = {}
        self.claims: list[Claim] = []
        self.numbers = 0
        self.host = torch.zeros((PAGES, PAGE // 8), dtype=torch.int64)

    @initialize(capacity=st.integers(1, CAPACITY))
    def begin(self, capacity: int) -> None:
        self.arena, self.capacity = small(capacity), capacity

    @property
    def used(self) -> int:
        return sum(len(pages) for pages in self.pages.values()) + sum(claim.pages for claim in self.claims)

    @precondition(lambda self: len(self.regions) < 5)
    @rule()
    def reserve(self) -> None:
        self.numbers += 1
        self.regions[self.numbers] = self.arena.reserve(f"owner {self.numbers % 2}", PAGES)
        self.pages[self.numbers] = {}

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.regions)))
        del self.regions[number], self.pages[number]

    @precondition(lambda self: self.regions)
    @rule(data=st.data(), first=st.integers(0, PAGES), count=st.integers(0, PAGES + 1), up=st.booleans())
    def change(self, data: st.DataObject, first: int, count: int, up: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.regions)))
        region, pages = self.regions[number], self.pages[number]
        run = range(first, first + count)
        allowed = first + count <= PAGES and all((page in pages) != up for page in run)
        full = up and self.used + count > self.capacity
        if not allowed or full:
            with pytest.raises(ArenaError if not allowed else ArenaFull):
                (region.map if up else region.unmap)(first, count)
            return
        (region.map if up else region.unmap)(first, count)
        for page in run:
            if up:
                self.numbers += 1
                words(self.arena, region)[page] = pages[page] = self.numbers
            else:
                del pages[page]

    @precondition(lambda self: self.regions)
    @rule(
        data=st.data(),
        windows=st.lists(st.tuples(st.integers(0, PAGES), st.integers(0, PAGES // 2)), max_size=3),
        up=st.booleans(),
        zeros=st.booleans(),
    )
    def move(self, data: st.DataObject, windows: list[tuple[int, int]], up: bool, zeros: bool) -> None:
        """Windows in order: in, as far as it goes; out, all of them or none."""
        number = data.draw(st.sampled_from(sorted(self.regions)))
        region, pages = self.regions[number], self.pages[number]
        self.host[:] = -torch.arange(PAGES)[:, None] - 1
        at, row, refused, there, before = [], 0, False, {}, dict(pages)
        for first, count in windows:
            if row + count > PAGES:
                break
            to = 0 if up and zeros else self.host[min(row, PAGES - 1)].data_ptr()
            at.append((first, count, to))
            run = range(first, first + count)
            refused = refused or first + count > PAGES or any((page in pages) == up for page in run)
            refused = refused or (up and self.used + count > self.capacity)
            for page in run if not refused else ():
                if up:
                    pages[page] = 0 if zeros else -row - 1
                else:
                    there[row] = pages.pop(page)
                row += 1
        if refused:
            with pytest.raises(ArenaError):
                (region.move_in if up else region.move_out)(at)
            if not up:
                self.pages[number], there = before, {}
        else:
            (region.move_in if up else region.move_out)(at)
        for place, stamp in there.items():
            assert int(self.host[place, 0]) == int(self.host[place, -1]) == stamp

    @rule(pages=st.integers(0, CAPACITY))
    def claim(self, pages: int) -> None:
        if self.used + pages > self.capacity:
            with pytest.raises(ArenaFull):
                self.arena.claim("claims", pages)
        else:
            self.claims.append(self.arena.claim("claims", pages))

    @precondition(lambda self: self.claims)
    @rule()
    def give_back(self) -> None:
        self.claims.pop()

    @rule()
    def trim(self) -> None:
        self.arena.trim()

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "arena"):
            return
        said = self.arena.statistics()
        assert said.used == self.used == sum(use.pages for use in said.owners)
        assert said.kept + said.used <= said.capacity == self.capacity
        for number, region in self.regions.items():
            content = words(self.arena, region)
            for page, stamp in self.pages[number].items():
                assert int(content[page, 0]) == int(content[page, -1]) == stamp


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_sizes_are_whole_pages() -> None:
    arena = open_arena(torch.device("cpu"), 10 * CPU_PAGE_BYTES + 5)
    assert arena.statistics().capacity == 10
    assert [pages_of(arena, size) for size in (0, 1, CPU_PAGE_BYTES, CPU_PAGE_BYTES + 1)] == [0, 1, 1, 2]
