"""A window of layers: each is there when it is due, in its slot, whatever the program; and copies are late, in order
and no faster than they may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from core.memory import _arena
from core.memory.moment import Passed
from core.memory.rate import Rate
from core.memory.swap import Scratch
from core.memory.window import PIECE_BYTES, Block, HostWeights, LayerWindow

PAGE = 4096
LAYER = [((3, 5), torch.float32), ((7,), torch.bfloat16)]
FIXED = [((11,), torch.float32)]
CPU = torch.device("cpu")


def host(layers: int, layer: Sequence[tuple[tuple[int, ...], torch.dtype]] = LAYER) -> HostWeights:
    """Layer i is full of i + 1, what belongs to none of 100."""
    block, fixed = Block.of(layer), Block.of(FIXED)
    made = HostWeights(layers, block, fixed)
    for number, flat in enumerate(made.layers):
        for tensor in block.tensors(flat):
            tensor.fill_(number + 1)
    fixed.tensors(made.fixed)[0].fill_(100)
    return made


def plain(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 7, dtype=dtype)


def window(layers: int, slots: int, **options: object) -> LayerWindow:
    made = LayerWindow(layers, LAYER, FIXED, slots, plain, device=CPU, **options)  # type: ignore[arg-type]
    made.source = host(layers)
    return made


def of(values: LayerWindow, layer: int) -> set[float]:
    return {float(value) for tensor in values.tensors(layer) for value in tensor.flatten()}


def micro_batch(layers: int) -> list[int]:
    return [*range(layers), *reversed(range(layers))]


class Copied:
    """Copies in the order in which they are asked for, without a delay."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        self.bytes.append(len(target))

    def mark(self) -> Passed:
        return Passed()

    def after(self, moment: object) -> None:
        pass


class Device:
    """Two streams, of copies and of computing, whose work is done when `run` is called, in any order that waits and
    marks leave open: the one that `first` names goes as far as it can before the other."""

    class Mark:
        def __init__(self) -> None:
            self.passed = False

        def query(self) -> bool:
            return self.passed

        def synchronize(self) -> None:
            assert self.passed

    class Stream:
        def __init__(self) -> None:
            self.work: list[Callable[[], bool]] = []

        def run(self) -> bool:
            moved = False
            while self.work and self.work[0]():
                self.work.pop(0)
                moved = True
            return moved

        def do(self, work: Callable[[], object]) -> None:
            self.work.append(lambda: (work(), True)[1])

        def record_event(self) -> Device.Mark:
            mark = Device.Mark()
            self.do(lambda: setattr(mark, "passed", True))
            return mark

        def wait_event(self, mark: Device.Mark) -> None:
            self.work.append(lambda: mark.passed)

        # As `Copies`:
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            self.do(lambda: target.copy_(source))

        mark, after = record_event, wait_event

    def __init__(self, first: str) -> None:
        self.copies, self.computes = Device.Stream(), Device.Stream()
        self._order = [self.copies, self.computes] if first == "copies" else [self.computes, self.copies]

    def run(self) -> None:
        while any(stream.run() for stream in self._order):
            pass
        assert not self.copies.work and not self.computes.work, "they wait for each other"


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_every_layer_is_in_its_slot_when_it_is_due(slots: int) -> None:
    values = window(5, slots)
    places = [tensor.data_ptr() for layer in range(5) for tensor in values.tensors(layer)]
    for program in (micro_batch(5), micro_batch(5), list(range(5)), list(range(5)) * 2, micro_batch(5) * 3):
        values.follow(program)
        for layer in program:
            with values.computing():
                assert of(values, layer) == {layer + 1}
                assert set(values.fixed_tensors[0].tolist()) == {100}
    assert [tensor.data_ptr() for layer in range(5) for tensor in values.tensors(layer)] == places


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_what_is_there_is_not_copied_again(slots: int) -> None:
    """The last layers of a forward stay for the backward, the first ones of a backward for the next forward."""
    copied = Copied()
    values = window(5, slots, copies=copied)
    for _ in range(3):
        values.follow(micro_batch(5))
        for _ in micro_batch(5):
            with values.computing():
                pass
    # At first a window and what belongs to no layer, then what does not stay, there and back.
    assert len(copied.bytes) == 1 + slots + 3 * 2 * (5 - slots)


@pytest.mark.parametrize("first", ["copies", "computes"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_streams_that_run_ahead_of_each_other_see_the_right_layers(slots: int, first: str) -> None:
    device = Device(first)
    values = window(5, slots, copies=device.copies)
    seen: list[set[float]] = []
    wanted: list[set[float]] = []
    for program in (micro_batch(5), micro_batch(5), list(range(5))):
        values.follow(program)
        values.feed()
        for layer in program:
            values.enter(device.computes)
            device.computes.do(lambda layer=layer: seen.append(of(values, layer)))  # type: ignore[misc]
            values.leave(device.computes)
            wanted.append({layer + 1})
    assert not seen, "everything is queued and nothing has run"
    device.run()
    assert seen == wanted


def test_a_layer_is_there_once_its_copy_has_landed() -> None:
    device = Device("copies")
    values = window(5, 2, copies=device.copies)
    values.follow(micro_batch(5))
    assert values.there(9) == 0
    values.feed()
    assert values.there(9) == 0, "queued is not there"
    device.run()
    assert (values.there(1), values.there(9)) == (1, 2)
    values.enter(device.computes)
    values.leave(device.computes)
    assert values.there(9) == 1
    device.run()
    assert values.there(9) == 2
    values.follow([*range(5)])
    values.feed()
    for _ in range(5):
        values.enter(device.computes)
        values.leave(device.computes)
        device.run()
    assert values.there(9) == 0, "the program is over"


def test_a_layer_whose_copy_is_not_queued_cannot_be_computed_with() -> None:
    values = window(5, 2)
    values.follow([0, 1])
    with pytest.raises(RuntimeError, match="layer 0 is computed with before all of its copy is queued"):
        values.enter()


@pytest.mark.parametrize("after", range(11))
def test_a_program_that_is_given_up_begins_again_or_is_followed_by_another(after: int) -> None:
    device = Device("computes")
    values = window(5, 2, copies=device.copies)
    values.follow(micro_batch(5))
    seen: list[set[float]] = []

    def compute(program: list[int], count: int) -> None:
        values.feed()
        for layer in program[:count]:
            values.enter(device.computes)
            device.computes.do(lambda layer=layer: seen.append(of(values, layer)))  # type: ignore[misc]
            values.leave(device.computes)
            if layer % 2:
                device.run()

    compute(micro_batch(5), after)
    values.stop()
    values.follow(list(range(5)))
    compute(list(range(5)), 5)
    device.run()
    assert seen == [{layer + 1} for layer in [*micro_batch(5)[:after], *range(5)]]


def test_memory_that_was_somebody_elses_meanwhile_is_filled_anew() -> None:
    arena = _arena.memfd_arena(PAGE, 64)
    scratch = Scratch(arena, "job 1")
    values = LayerWindow(5, LAYER, FIXED, 2, scratch.take, device=CPU, mappings=lambda: scratch.mappings)
    values.source = host(5)
    assert scratch.pages * PAGE >= values.bytes
    for interrupted in (0, 3, 7, 10):
        scratch.map()
        values.follow(micro_batch(5))
        for layer in micro_batch(5)[:interrupted]:
            with values.computing():
                assert of(values, layer) == {layer + 1} and set(values.fixed_tensors[0].tolist()) == {100}
        values.stop().synchronize()
        scratch.unmap()
        assert arena.statistics().used == 0
        other = arena.reserve("kv", 64)
        other.map(0, 64)
        other.bytes(0, 64 * PAGE, -1).fill_(3)
        del other


def test_copies_keep_to_the_rate() -> None:
    now, copied = [100.0], Copied()
    layer = [((PIECE_BYTES * 5 // 2,), torch.uint8)]
    values = LayerWindow(
        2, layer, FIXED, 1, plain, device=CPU, rate=Rate(10.0 * PIECE_BYTES), copies=copied, clock=lambda: now[0]
    )
    values.source = host(2, layer)
    values.follow([0, 1])
    for _ in range(200):
        values.feed()
        if values.there(1):
            break
        now[0] += 0.01
    elapsed = now[0] - 100.0
    assert max(copied.bytes) <= PIECE_BYTES, "in pieces"
    # 2.5 windows at ten a second: what is left is not waited for at the end, and a little is given at the beginning.
    assert 0.15 < elapsed < 0.25
    now[0] += 1000
    copied.bytes.clear()
    with values.computing():
        pass
    assert sum(copied.bytes) <= PIECE_BYTES, "an idle time is not made up for"


def test_autograd_does_not_mind_that_a_weight_it_saved_was_away() -> None:
    values = LayerWindow(3, [((4, 4), torch.float32)], FIXED, 1, plain, device=CPU)
    source = values.source = HostWeights(3, values.layer, values.fixed)
    weights = [torch.randn(4, 4) for _ in range(3)]
    for flat, weight in zip(source.layers, weights, strict=True):
        values.layer.tensors(flat)[0].copy_(weight)
    x = torch.randn(2, 4, requires_grad=True)
    values.follow(micro_batch(3))
    outs, entry = [], x
    for layer in range(3):
        with values.computing():
            entry = entry.detach().requires_grad_()
            outs.append((entry, torch.nn.functional.linear(entry, values.tensors(layer)[0])))
            entry = outs[-1][1]
    gradient = torch.ones(2, 4)
    for entry, out in reversed(outs):
        with values.computing():
            torch.autograd.backward(out, gradient)
            assert entry.grad is not None
            gradient = entry.grad
    expected = torch.ones(2, 4) @ weights[2] @ weights[1] @ weights[0]
    assert torch.allclose(gradient, expected)


def test_a_window_has_at_least_one_slot_and_no_more_than_layers() -> None:
    for slots in (0, 4):
        with pytest.raises(ValueError, match=f"a window of {slots} slots for 3 layers; give 1 to 3"):
            window(3, slots)
