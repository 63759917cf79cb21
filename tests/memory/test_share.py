"""A job's share: its state moves out and back, what autograd saves is counted to the byte, and all of it stays within
what was granted."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from core.memory import _arena
from core.memory.arena import Arena, ArenaError, OutOfMemory
from core.memory.metered import MeteredActivations
from core.memory.rate import Rate
from core.memory.share import JobShare, StaticActivations
from core.memory.swap import Scratch, Swappable

PAGE = 4096


class Bench:
    """A layer whose weight is the state, three pages of it."""

    def __init__(self, ceiling: int = 37, capacity: int = 64) -> None:
        self.arena: Arena = _arena.memfd_arena(PAGE, capacity)
        self.layer = torch.nn.Linear(512, 6, bias=False)
        weight = self.layer.weight.data
        self.state = Swappable(self.arena, "job 1", [(tuple(weight.shape), weight.dtype)], window=PAGE)
        self.state.put([weight])
        self.layer.weight.data = self.state.tensors[0]
        shared = [*self.layer.parameters()]
        self.activations = MeteredActivations(self.arena, "job 1", ceiling, shared=shared)
        self.share = JobShare(self.state, self.activations)

    @property
    def used(self) -> int:
        return self.arena.statistics().used

    def grant(self, pages: int | None = None) -> None:
        self.share.grant(self.share.wanted if pages is None else pages)
        self.share.settle()

    def run(self) -> torch.Tensor:
        given = torch.randn(8, 512)
        with self.activations.computing():
            out = self.layer(given)
            return (out.sin() + out.cos()).sum()

    def run_as_far_as_it_goes(self) -> None:
        """Granting what it asks for."""
        while True:
            try:
                return self.run().backward()
            except OutOfMemory:
                assert self.activations.ask()
            self.grant()


def test_it_wants_its_state_and_nothing_else_before_it_has_run() -> None:
    bench = Bench()
    assert (bench.share.wanted, bench.share.held, bench.share.ready, bench.used) == (3, 0, False, 0)
    weight = bench.state.contents([0])[0]
    bench.grant()
    assert (bench.share.wanted, bench.share.held, bench.share.ready, bench.used) == (0, 3, True, 3)
    assert torch.equal(bench.layer.weight, weight)


def test_saved_tensors_count_once_and_parameters_not_at_all() -> None:
    bench = Bench()
    bench.grant()
    bench.activations.grant(10)
    first = bench.run()
    size = 8 * 512 * 4 + 8 * 6 * 4  # what was given, and what the layer made of it
    assert bench.activations.high_water_bytes == size
    first.backward()
    del first
    gc.collect()
    bench.run()
    assert bench.activations.high_water_bytes == size


def test_what_was_not_granted_is_asked_for_and_comes() -> None:
    bench = Bench()
    bench.grant()
    for expected in (4, 8):
        with pytest.raises(OutOfMemory, match="are granted; a job can have 0 MiB for its activations"):
            bench.run()
        assert bench.activations.ask()
        bench.grant()
        assert bench.activations.held == expected
    bench.run().backward()
    assert bench.layer.weight.grad is not None


def test_beyond_the_ceiling_it_is_out_of_memory_and_the_remedy_is_named() -> None:
    bench = Bench(ceiling=2)
    bench.grant()
    for more in (True, False):
        with pytest.raises(OutOfMemory, match=r"lower micro_batch_tokens.* larger engine\.max_total_tokens"):
            bench.run()
        assert bench.activations.ask() is more
        bench.grant()
    assert bench.used == 5


def test_activations_are_given_up_and_wanted_again() -> None:
    bench = Bench()
    bench.grant()
    bench.run_as_far_as_it_goes()
    held = bench.activations.held
    bench.share.give_up_activations()
    bench.share.settle()
    assert (bench.share.held, bench.share.wanted, bench.used) == (3, held, 3)


def test_what_is_ordered_of_a_share_that_was_closed_is_done() -> None:
    """A job that cannot begin closes it in a thread of its own, while the broker decides."""
    bench = Bench()
    bench.share.close()
    bench.share.grant(3)
    for order in (bench.share.give_up_activations, bench.share.swap_out):
        order().synchronize()
    assert (bench.used, bench.share.ready, bench.share.wanted) == (0, False, 0)


def test_a_swapped_out_job_holds_nothing_and_comes_back_as_it_was() -> None:
    bench = Bench()
    bench.grant()
    bench.run_as_far_as_it_goes()
    weight, held = bench.layer.weight.detach().clone(), bench.share.held
    bench.share.give_up_activations()
    bench.share.swap_out()
    bench.share.settle()
    assert (bench.used, bench.share.wanted, bench.share.ready) == (0, held, False)
    assert torch.equal(bench.state.contents([0])[0], weight)
    bench.grant()
    assert torch.equal(bench.layer.weight, weight) and bench.share.ready
    assert bench.share.swapped_bytes == 3 * 3 * PAGE  # in, out and in again
    bench.run().backward()


def test_it_gives_up_when_what_is_queued_is_over_and_wants_nothing_before() -> None:
    bench = Bench()
    bench.grant()
    over = threading.Event()

    class Queue:
        def synchronize(self) -> None:
            over.wait()

    move = bench.share.swap_out(Queue())
    assert bench.share.under_way is move and (move.query(), move.began_at, move.over_at) == (False, None, None)
    assert (bench.used, bench.share.moving, bench.share.ready, bench.share.wanted) == (3, True, False, 0)
    assert bench.share.takeable == (0, 0), "it cannot be taken twice"
    over.set()
    move.synchronize()
    assert move.began_at is not None and move.over_at is not None and move.began_at <= move.over_at
    assert bench.share.under_way is None
    assert (bench.used, bench.share.moving, bench.share.wanted) == (0, False, 3)


class Counted:
    """A moment that passes when it is told to, and counts who waits for it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1
        if not self.over.wait(60.0):
            raise RuntimeError("nobody let it pass")


def test_two_orders_wait_once_for_what_is_queued() -> None:
    bench = Bench()
    bench.grant()
    bench.run_as_far_as_it_goes()
    queued, later = Counted(), Counted()
    moves = bench.share.give_up(queued)
    queued.over.set()
    moves[1].synchronize()
    assert queued.waited == 1 and moves[1].began_at is not None and bench.used == 0
    later.over.set()
    bench.share.give_up_activations(later)
    bench.share.settle()
    bench.share.swap_out(later).synchronize()
    assert later.waited == 2, "the order before had been carried out: nothing is known of the moment"


class Refusing:
    """A region whose driver refuses to copy."""

    mapped = 3

    def move_out(self, windows: object) -> None:
        raise ArenaError("the driver refuses")


def test_a_state_that_cannot_leave_keeps_no_activations() -> None:
    bench = Bench()
    bench.grant()
    bench.run_as_far_as_it_goes()
    region, bench.state._region = bench.state._region, Refusing()  # type: ignore[assignment]
    bench.share.give_up()[1].synchronize()
    assert (bench.activations.held, bench.used) == (0, 3)
    with pytest.raises(ArenaError, match="the driver refuses"):
        bench.share.check()
    bench.state._region = region
    assert bench.state.out() == 3 * PAGE and bench.used == 0


def test_what_could_not_be_waited_for_is_not_taken() -> None:
    bench = Bench()
    bench.grant()

    class Broken(Counted):
        def synchronize(self) -> None:
            super().synchronize()
            raise RuntimeError("the device is gone")

    broken = Broken()
    moves = bench.share.give_up(broken)
    broken.over.set()
    moves[1].synchronize()
    assert broken.waited == 2 and moves[1].began_at is None and bench.used == 3


def test_what_is_taken_again_on_its_way_in_comes_no_further() -> None:
    bench = Bench()
    weight = bench.state.contents([0])[0]
    slow = JobShare(bench.state, bench.activations, Rate(PAGE * 10.0))  # a window each 100 ms
    slow.grant(3)
    while not bench.state.mapped:
        time.sleep(0.001)
    slow.give_up_activations()
    slow.swap_out()
    slow.settle()
    assert slow.swapped_bytes < 6 * PAGE and (bench.used, slow.wanted, slow.ready) == (0, 3, False)
    assert torch.equal(bench.state.contents([0])[0], weight)
    slow.close()
    slow.settle()


def test_without_its_activations_the_state_comes_in_all_the_same() -> None:
    bench = Bench()
    slow = JobShare(bench.state, bench.activations, Rate(PAGE * 50.0))
    slow.grant(3)
    slow.give_up_activations()
    slow.settle()
    assert (bench.used, slow.swapped_bytes, slow.ready) == (3, 3 * PAGE, True)


def test_pages_that_were_granted_and_are_not_there_yet_are_nobody_elses() -> None:
    bench = Bench()
    over = threading.Event()

    class Queue:
        def synchronize(self) -> None:
            over.wait()

    bench.share.give_up_activations(Queue())  # holds the thread
    bench.share.grant(3)
    assert (bench.share.promised, bench.used, bench.share.takeable) == (3, 0, (3, 0))
    over.set()
    bench.share.settle()
    assert (bench.share.promised, bench.used) == (0, 3)


def test_an_arena_that_is_full_after_all_leaves_it_waiting() -> None:
    bench = Bench(capacity=8)
    claim = bench.arena.claim("kv", 6)
    bench.grant()
    assert not bench.share.ready and bench.share.wanted == 1
    bench.share.check()
    claim.resize(0)
    bench.grant()
    assert bench.share.ready


def test_what_goes_wrong_in_its_thread_is_told_to_the_job() -> None:
    bench = Bench()

    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("the device is gone")

    bench.share.swap_out(Broken())
    bench.share.settle()
    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.share.check()


@pytest.mark.parametrize("swapped", [False, True])
def test_closing_gives_back_to_the_byte(swapped: bool) -> None:
    bench = Bench()
    bench.grant()
    bench.run_as_far_as_it_goes()
    if swapped:
        bench.share.swap_out()
    bench.share.close()
    bench.share.close()
    bench.share.settle()
    assert (bench.share.held, bench.share.wanted, bench.share.ready, bench.used) == (0, 0, False, 0)


def test_a_captured_programs_buffers_are_all_there_or_not_at_all() -> None:
    arena = _arena.memfd_arena(PAGE, 16)
    scratch = Scratch(arena, "job slot")
    buffer = scratch.take((5 * PAGE,), torch.uint8)
    state = Swappable(arena, "job slot", [((PAGE,), torch.float32)])
    share = JobShare(state, StaticActivations(scratch))
    assert share.wanted == 5 + 4
    share.grant(9)
    share.settle()
    assert share.ready and not buffer.any() and arena.statistics().used == 9
    share.give_up_activations()
    share.settle()
    assert (share.wanted, arena.statistics().used) == (5, 4)
    share.grant(5)
    share.close()
    share.settle()
    assert arena.statistics().used == 0
