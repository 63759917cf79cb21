"""Swap: tensors keep their addresses and their content, and their pages are somebody else's meanwhile. Scratch: all
there and zero, or not at all."""

from __future__ import annotations

import pytest
import torch

from core.memory import _arena
from core.memory.arena import Arena, ArenaError, ArenaFull
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
    assert paced(state.out(), Rate()) == held * PAGE == state.host_bytes
    assert not state.inside and arena.statistics().used == 0
    other = arena.reserve("kv", 60)
    other.map(0, 60)
    del other
    assert paced(state.back(), Rate()) == held * PAGE
    assert state.inside and [tensor.data_ptr() for tensor in state.tensors] == places
    assert all(torch.equal(one, two) for one, two in zip(before, content(state), strict=True))


def test_it_goes_window_by_window_and_can_stop_in_between() -> None:
    arena, state = make()
    before, pages = content(state), arena.statistics().used
    out = state.out()
    freed = [next(out) // PAGE, next(out) // PAGE]
    assert freed == [pages % 4 or 4, 4] and arena.statistics().used == pages - sum(freed)
    assert paced(state.back(), Rate()) == sum(freed) * PAGE
    assert all(torch.equal(one, two) for one, two in zip(before, content(state), strict=True))


def test_without_pages_to_come_back_to_it_stays_outside_and_tries_again() -> None:
    arena, state = make(capacity=8)
    before = content(state)
    paced(state.out(), Rate())
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
        out = state.out()
        while state.mapped > inside:
            next(out)
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
    next(state.out())
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
