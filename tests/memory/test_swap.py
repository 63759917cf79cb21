"""Swap: tensors keep their addresses and their content, and their pages are somebody else's meanwhile. Scratch: all
there and zero, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from core.memory import _arena
from core.memory.arena import Arena, ArenaError, ArenaFull, Region
from core.memory.rate import Rate
from core.memory.staging import staging
from core.memory.swap import Scratch, Swappable, paced

PAGE = 4096


def make(capacity: int = 64) -> tuple[Arena, Swappable]:
    arena = _arena.memfd_arena(PAGE, capacity)
    shapes = [((1000,), torch.float32), ((3, 700), torch.float32), ((5000,), torch.bfloat16), ((10,), torch.float32)]
    state = Swappable(arena, "job 1", shapes, window=4 * PAGE)
    assert not state.inside and (state.mapped, state.host_bytes) == (0, 0)
    paced(state.back(), Rate())
    assert not any(tensor.any() for tensor in state.tensors)
    for number, tensor in enumerate(state.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1e5 * number)
    return arena, state


def content(state: Swappable) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.tensors]


def test_out_and_back_changes_neither_content_nor_addresses() -> None:
    arena, state = make()
    before, places = content(state), [tensor.data_ptr() for tensor in state.tensors]
    held = arena.statistics().used
    assert held == state.pages == -(-(4096 + 8704 + 10240 + 512) // PAGE)
    assert state.out() == held * PAGE == state.host_bytes
    assert not state.inside and arena.statistics().used == 0
    other = arena.reserve("kv", 60)
    other.map(0, 60)
    del other
    assert paced(state.back(), Rate()) == held * PAGE
    assert state.inside and [tensor.data_ptr() for tensor in state.tensors] == places
    assert all(torch.equal(one, two) for one, two in zip(before, content(state), strict=True))


def test_it_comes_back_window_by_window_and_can_stop_in_between() -> None:
    arena, state = make()
    before, pages = content(state), arena.statistics().used
    assert pages == 6
    for there in (1, 2):
        state.out()
        assert list(islice(state.back(), there)) == [4 * PAGE, 2 * PAGE][:there]
        assert arena.statistics().used == state.mapped == [4, 6][there - 1]
    state.out()
    next(state.back())
    assert state.out() == 4 * PAGE and (arena.statistics().used, state.host_bytes) == (0, 6 * PAGE)
    assert paced(state.back(), Rate()) == 6 * PAGE
    assert all(torch.equal(one, two) for one, two in zip(before, content(state), strict=True))


class Refusing:
    """A region whose driver refuses, as `native/test` has it do it for real."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def move_out(self, windows: Sequence[tuple[int, int, int]]) -> None:
        raise ArenaError("the driver refuses")


def test_what_cannot_leave_stays_inside_and_leaves_the_next_time() -> None:
    arena, state = make()
    before = content(state)
    refusing = Refusing(state._region)
    state._region = refusing  # type: ignore[assignment]
    with pytest.raises(ArenaError, match="the driver refuses"):
        state.out()
    state._region = refusing.region
    assert (state.inside, state.mapped, state.host_bytes) == (True, 6, 0)
    assert all(torch.equal(one, two) for one, two in zip(before, state.contents(range(4)), strict=True))
    assert state.out() == 6 * PAGE and arena.statistics().used == 0
    assert all(torch.equal(one, two) for one, two in zip(before, state.contents(range(4)), strict=True))


def test_content_that_is_asked_for_while_all_of_it_moves_is_right() -> None:
    _, state = make()
    before, wrong = content(state), []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            wrong.extend(n for n, tensor in enumerate(state.contents(range(4))) if not torch.equal(tensor, before[n]))

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    for _ in range(200):
        state.out()
        paced(state.back(), Rate())
    over.set()
    for thread in looking:
        thread.join()
    assert not wrong


def test_without_pages_to_come_back_to_it_stays_outside_and_tries_again() -> None:
    arena, state = make(capacity=8)
    before = content(state)
    state.out()
    claim = arena.claim("kv", 4)
    with pytest.raises(ArenaFull):
        paced(state.back(), Rate())
    assert not state.inside
    del claim
    paced(state.back(), Rate())
    assert state.inside
    assert all(torch.equal(one, two) for one, two in zip(before, content(state), strict=True))


def test_content_is_read_and_written_wherever_it_lies() -> None:
    _, state = make()
    before = content(state)
    for inside in (state.pages, 4, 0):  # all of it, the first window, nothing
        state.out()
        back = state.back()
        while state.mapped < inside:
            next(back)
        assert state.mapped == inside
        assert all(torch.equal(one, two) for one, two in zip(before, state.contents(range(4)), strict=True))
        other = [tensor * 2 + inside for tensor in before]
        state.put(other)
        assert all(torch.equal(one, two) for one, two in zip(other, state.contents(range(4)), strict=True))
        before = other
    paced(state.back(), Rate())
    assert all(torch.equal(one, two) for one, two in zip(before, content(state), strict=True))


def test_what_is_forgotten_comes_back_as_zero() -> None:
    arena, state = make()
    state.out()
    next(state.back())
    assert (state.mapped, state.host_bytes) == (4, 2 * PAGE)
    state.forget()
    assert (arena.statistics().used, state.mapped, state.host_bytes) == (0, 0, 0)
    assert not any(tensor.any() for tensor in state.contents(range(4)))
    paced(state.back(), Rate())
    assert not any(tensor.any() for tensor in state.tensors)


def test_all_copies_of_a_device_go_by_one_way_and_each_byte_once() -> None:
    _, state = make()
    way, copied = staging(torch.device("cpu")), []
    assert way is staging(torch.device("cpu"))
    fetch_to = way.fetch_to

    def counted(made: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(len(made))
        fetch_to(made, source)

    way.fetch_to = counted  # type: ignore[method-assign]
    try:
        for one, two in zip(state.contents(range(4)), state.tensors, strict=True):
            assert torch.equal(one, two)
    finally:
        del way.fetch_to
    assert sum(copied) == sum(tensor.nbytes for tensor in state.tensors)


def test_scratch_is_zero_whoever_had_its_pages() -> None:
    arena = _arena.memfd_arena(PAGE, 8)
    scratch = Scratch(arena, "job 1")
    small, large = scratch.take((3, 5), torch.bfloat16), scratch.take((2 * PAGE,), torch.uint8)
    assert (scratch.pages, scratch.mapped, arena.statistics().used) == (3, 0, 0)
    for mapped in range(3):
        scratch.map()
        assert (scratch.mapped, scratch.mappings) == (3, mapped + 1)
        assert not small.any() and not large.any()
        small.fill_(1.0)
        large.fill_(7)
        scratch.unmap()
        scratch.unmap()
    claim = arena.claim("kv", 6)
    with pytest.raises(ArenaFull):
        scratch.map()
    assert (scratch.mapped, scratch.mappings, claim.pages) == (0, 3, 6)
    claim.resize(0)
    scratch.take((6 * PAGE,), torch.uint8)
    with pytest.raises(ArenaFull, match="asks for 9 pages"):
        scratch.map()
    with pytest.raises(ArenaError, match="of a region of"):
        scratch.take((64 * PAGE,), torch.uint8)


def test_a_rate_is_kept_on_average() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def windows() -> object:
        for _ in range(10):
            now[0] += 0.01  # the copy itself
            yield 1000

    assert paced(windows(), Rate(10_000.0), clock=lambda: now[0], sleep=sleep) == 10_000  # type: ignore[arg-type]
    assert now[0] == pytest.approx(1.0)
    assert slept[0] == pytest.approx(0.09)
