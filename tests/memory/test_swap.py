"""Swap: tensors keep their addresses and their content, and their pages are somebody else's meanwhile."""

from __future__ import annotations

import pytest
import torch

from core.memory import _arena
from core.memory.arena import Arena, ArenaFull
from core.memory.swap import Rate, Swappable, paced

PAGE = 4096


def make(capacity: int = 64) -> tuple[Arena, Swappable]:
    arena = _arena.memfd_arena(PAGE, capacity)
    state = Swappable(arena, "job 1", [(1000,), (3, 700), (5000,)], torch.float32, window=4 * PAGE)
    for number, tensor in enumerate(state.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1e5 * number)
    return arena, state


def content(state: Swappable) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.tensors]


def test_out_and_back_changes_neither_content_nor_addresses() -> None:
    arena, state = make()
    before, places = content(state), [tensor.data_ptr() for tensor in state.tensors]
    held = arena.statistics().used
    assert held == -(-(4096 + 8704 + 20480) // PAGE)
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
    arena, state = make(capacity=12)
    before = content(state)
    paced(state.out(), Rate())
    claim = arena.claim("kv", 7)
    with pytest.raises(ArenaFull):
        paced(state.back(), Rate())
    assert not state.inside
    del claim
    paced(state.back(), Rate())
    assert state.inside
    assert all(torch.equal(one, two) for one, two in zip(before, content(state), strict=True))


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
