"""A job's share: what autograd saves is counted to the byte and stays within what was granted."""

from __future__ import annotations

import gc

import pytest
import torch

from core.memory import _arena
from core.memory.arena import Arena, OutOfMemory
from core.memory.share import JobShare

PAGE = 4096


def make(cap: int = 40, state_bytes: int = 3 * PAGE) -> tuple[Arena, JobShare, torch.nn.Linear]:
    layer = torch.nn.Linear(512, 512, bias=False)
    arena = _arena.memfd_arena(PAGE, 64)
    return arena, JobShare(arena, "job 1", state_bytes, cap, shared=layer.parameters()), layer


def test_it_wants_its_state_and_nothing_else_before_it_has_run() -> None:
    arena, share, _ = make()
    assert (share.wanted, share.held) == (3, 0)
    share.grant(3)
    assert (share.wanted, share.held, share.activations) == (0, 3, 0)
    assert arena.statistics().used == 3


def test_saved_tensors_count_once_and_parameters_not_at_all() -> None:
    _, share, layer = make()
    share.grant(3 + 10)
    given = torch.randn(8, 512)
    with share.metering():
        out = layer(given)
        again = (out.sin() + out.cos()).sum()
    assert share.high_water_bytes == 2 * 8 * 512 * 4
    again.backward()
    del out, again
    gc.collect()
    with share.metering():
        layer(given)
    assert share.high_water_bytes == 2 * 8 * 512 * 4


def test_what_was_not_granted_is_asked_for_and_comes() -> None:
    _, share, layer = make()
    share.grant(3)
    given = torch.randn(8, 512)
    for expected in (4, 8):
        with pytest.raises(OutOfMemory, match="are granted"), share.metering():
            layer(given).sin().sum()
        assert share.ask()
        share.grant(share.wanted)
        assert share.activations == expected
    with share.metering():
        layer(given).sin().sum().backward()
    assert layer.weight.grad is not None


def test_beyond_the_cap_it_is_out_of_memory() -> None:
    _, share, layer = make(cap=5)
    share.grant(3)
    with pytest.raises(OutOfMemory), share.metering():
        layer(torch.randn(8, 512)).sin()
    assert share.ask() and share.wanted == 2
    share.grant(2)
    with pytest.raises(OutOfMemory), share.metering():
        layer(torch.randn(8, 512)).sin()
    assert not share.ask()


def test_activations_are_given_up_and_wanted_again() -> None:
    arena, share, layer = make()
    share.grant(3)
    with pytest.raises(OutOfMemory), share.metering():
        layer(torch.randn(8, 512))
    share.ask()
    share.grant(share.wanted)
    share.give_up_activations()
    assert (share.held, share.wanted, arena.statistics().used) == (3, 4, 3)


def test_closing_gives_back_to_the_byte() -> None:
    arena, share, _ = make()
    share.grant(20)
    share.close()
    assert (share.held, share.wanted, arena.statistics().used) == (0, 0, 0)
    share.grant(5)
    assert arena.statistics().used == 0
