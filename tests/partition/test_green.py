"""SM partitions on a real GPU."""

from __future__ import annotations

import pytest
import torch

from core.partition import green
from core.partition.part import Part, Partitions
from core.policy.types import WHOLE

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def partitions() -> Partitions:
    return green.make(torch.device("cuda", 0), 6)


def splits(partitions: Partitions) -> list[Part]:
    return [part for part in partitions.parts if part.layout.kind == "split"]


def sms_of(stream: torch.cuda.Stream) -> set[int]:
    """The SMs that a grid larger than the device ran on, launched on another stream from a graph captured on this."""
    import triton
    import triton.language as tl

    @triton.jit
    def which(out, n: tl.constexpr):  # type: ignore[no-untyped-def]
        lanes = tl.arange(0, n)
        sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1)
        total = sm
        for _ in range(2000):  # long enough that every SM gets some of the grid
            total = total * 3 + 1
        tl.store(out + tl.program_id(0) * n + lanes, tl.where(total == 12345, sm, sm))

    out = torch.full((4096, 128), -1, dtype=torch.int32, device="cuda")
    with torch.cuda.stream(stream):
        which[(4096,)](out, 128)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            which[(4096,)](out, 128)
    out.fill_(-1)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    return set(out.flatten().tolist())


def test_each_split_covers_the_device_and_says_what_the_driver_gave(partitions: Partitions) -> None:
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert partitions.sms == total
    assert partitions.layouts[0] == WHOLE
    assert len(splits(partitions)) >= 3
    for part in splits(partitions):
        assert part.layout.decode_sms + part.layout.finetune_sms == total


def test_a_graph_stays_on_the_sms_that_it_was_captured_on(partitions: Partitions) -> None:
    for part in splits(partitions)[::2]:
        decode, finetune = sms_of(part.decode), sms_of(part.finetune)
        assert -1 not in decode | finetune
        assert len(decode) <= part.layout.decode_sms
        assert len(finetune) <= part.layout.finetune_sms
        assert not decode & finetune


def test_a_confined_layout_has_the_split_s_finetune_part(partitions: Partitions) -> None:
    for part in partitions.parts:
        if part.layout.kind == "confined":
            same = [other for other in splits(partitions) if other.finetune is part.finetune]
            assert [other.layout.finetune_sms for other in same] == [part.layout.finetune_sms]
            assert part.decode.priority < 0
