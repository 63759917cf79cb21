"""The arena on a GPU: the driver's own pages, torch's tensors and allocations on them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from core.memory.arena import OutOfMemory, open_arena, page_bytes, view
from core.memory.job_heap import JobHeap
from core.memory.rate import Rate
from core.memory.rows import Rows
from core.memory.share import JobShare, StaticActivations
from core.memory.staging import PIECE_BYTES, Staging
from core.memory.swap import Scratch, Swappable, paced

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
MIB = 2**20


def test_content_stays_behind_its_address_while_rows_come_and_go() -> None:
    arena = open_arena(GPU, 64 * MIB, 2 * MIB)
    assert arena.page_bytes == 2 * MIB
    rows = Rows(arena, "kv", [2048, 2048], tokens=8192)
    rows.resize(rows.most)
    key = rows.tensor(0, (8192, 512), torch.float32)
    key[:] = torch.arange(8192, device=GPU)[:, None]
    torch.cuda.synchronize()
    rows.resize(2)
    rows.resize(5)
    assert torch.equal(key[:2048, 0].cpu(), torch.arange(2048.0))
    assert arena.statistics().used == 10


def test_pages_are_larger_where_there_is_much_memory_and_whole_ones_of_the_drivers() -> None:
    assert page_bytes(GPU) in (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
    assert open_arena(GPU, 64 * MIB).page_bytes == page_bytes(GPU)
    assert open_arena(GPU, 64 * MIB, 3 * MIB).page_bytes == 4 * MIB


def test_pages_are_written_and_read_by_either_address_that_they_are_behind() -> None:
    """They go to and fro between KV cache and job: each uses them when the other's work is over."""
    arena = open_arena(GPU, 64 * MIB, 2 * MIB)
    kv, job = arena.reserve("kv", 32), arena.reserve("job", 20)
    kv.map(0, 32)
    size = 2 * MIB // 4
    of_kv = view(arena, kv, (32, size), torch.int32)
    of_job = view(arena, job, (20, size), torch.int32)
    kept = torch.arange(12, device=GPU, dtype=torch.int32)[:, None].expand(12, size)
    of_kv[:12] = kept
    kv.unmap(12, 20)
    job.map(0, 20)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        of_job.add_(1)
    torch.cuda.synchronize()
    mapped = arena.statistics().mapped
    for turn in range(50):
        of_job.fill_(turn)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            graph.replay()
            end = stream.record_event()
        end.synchronize()
        job.unmap(0, 20)
        kv.map(12, 20)
        assert torch.equal(of_kv[12:], torch.full((20, size), turn + 1, device=GPU, dtype=torch.int32))
        of_kv[12:] = -turn
        torch.cuda.synchronize()
        kv.unmap(12, 20)
        job.map(0, 20)
        assert torch.equal(of_job, torch.full((20, size), -turn, device=GPU, dtype=torch.int32))
    assert torch.equal(of_kv[:12], kept)
    said = arena.statistics()
    assert said.mapped - mapped == 50 * 40 and said.in_place >= 50 * 40 and said.created == 32


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 5 * PIECE_BYTES + 12])
def test_staged_copies_bring_every_byte_behind_what_the_stream_has_queued(size: int) -> None:
    staging, stream = Staging(GPU, Rate()), torch.cuda.Stream()
    content = torch.randint(256, (size,), dtype=torch.uint8)
    there = torch.zeros(size, dtype=torch.uint8, device=GPU)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms, in which what is copied is not there yet
        there.fill_(7)
        assert torch.equal(staging.fetch(there), torch.full((size,), 7, dtype=torch.uint8))
        torch.cuda._sleep(20_000_000)
        there.fill_(8)
        staging.store(there, content)
    assert torch.equal(there.cpu(), content)


@pytest.mark.parametrize("pinned", [True, False])
def test_windows_of_many_pages_move_in_one_call_of_a_thread_without_a_context_beside_a_kernel(pinned: bool) -> None:
    arena = open_arena(GPU, 64 * MIB, 2 * MIB)
    region = arena.reserve("job", 16)
    region.map(0, 16)
    flat = view(arena, region, (32 * MIB,), torch.uint8)
    content = torch.randint(256, (32 * MIB,), dtype=torch.uint8)
    flat.copy_(content)
    host = torch.zeros(32 * MIB, dtype=torch.uint8, pin_memory=pinned)
    windows = [(first, count, host.data_ptr() + first * 2 * MIB) for first, count in ((12, 4), (5, 7), (0, 5))]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1000)  # so that nothing is loaded later
    torch.cuda.synchronize()

    def moved(call: Callable[[list[tuple[int, int, int]]], None]) -> None:
        with ThreadPoolExecutor(1) as thread:  # a new one, in which nothing has asked for the device
            thread.submit(call, windows).result()

    for _ in range(2):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)  # about half a second
            end = stream.record_event()
        moved(region.move_out)
        out_beside = not end.query()
        assert (region.mapped, arena.statistics().used) == (0, 0)
        assert torch.equal(host, content)
        moved(region.move_in)
        in_beside = not end.query()
        assert (region.mapped, arena.statistics().used) == (16, 16)
        end.synchronize()
        assert torch.equal(flat.cpu(), content)
        host.zero_()
    if pinned:  # elsewhere the driver may wait for what it likes
        assert (out_beside, in_beside) == (True, True), "moving waits for a kernel of another stream"
    region.move_out(windows)
    region.move_in([(0, 9, 0), (9, 7, 0)])
    assert not flat.any()


def test_a_share_is_given_up_behind_what_is_queued_and_comes_back_with_its_content() -> None:
    arena = open_arena(GPU, 512 * MIB)
    state = Swappable(arena, "job 1", [((96 * MIB // 4,), torch.float32)], window=32 * MIB)
    scratch = Scratch(arena, "job 1")
    buffer = scratch.take((64 * MIB,), torch.uint8)
    state.lock_pages()
    share, stream = JobShare(state, StaticActivations(scratch), Rate(8.0 * 2**30)), torch.cuda.Stream()
    values = (torch.arange(96 * MIB // 4) % 1000).float()
    for turn in range(3):
        share.grant(share.wanted)
        share.settle()
        share.check()
        assert share.ready and not buffer.any()
        if turn == 0:
            state.tensors[0].copy_(values)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # about 50 ms, in which what is to leave is not there yet
            state.tensors[0].add_(1.0)
            buffer.fill_(7)
            queued = stream.record_event()
        moves = share.give_up(queued)
        moves[1].synchronize()
        share.check()
        assert arena.statistics().used == 0 and queued.query()
        assert torch.equal(state.contents([0])[0], values + (turn + 1.0))
    share.close()
    share.settle()


def test_a_captured_graph_runs_on_after_its_memory_was_away() -> None:
    arena = open_arena(GPU, 16 * MIB, 2 * MIB)
    region = arena.reserve("job", 4)
    region.map(0, 4)
    data = view(arena, region, (2 * MIB,), torch.float32)
    data.fill_(1.0)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        data.add_(1.0)
    torch.cuda.synchronize()
    region.unmap(0, 4)
    region.map(0, 4)
    data.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert float(data[0]) == float(data[-1]) == 6.0


def test_a_jobs_allocations_come_from_the_arena_as_far_as_they_were_granted() -> None:
    arena = open_arena(GPU, 512 * MIB, 2 * MIB)
    heap = JobHeap(arena, "job 1", 128)
    heap.grant(64)
    with heap.computing():
        kept = torch.zeros(32 * MIB // 4, device=GPU)
        assert heap.held == 64 and heap.promised <= 48 and arena.statistics().used >= 16
    with pytest.raises(OutOfMemory, match="of the 64 it may have"), heap.computing():
        torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
    assert heap.ask() and heap.needed == 128
    assert float(kept.sum()) == 0.0
    torch.cuda.synchronize()
    del kept
    heap.give_up()
    assert (heap.held, arena.statistics().used) == (0, 0)
    with pytest.raises(OutOfMemory), heap.computing():
        torch.empty(MIB, dtype=torch.uint8, device=GPU)


def test_state_moves_to_page_locked_memory_and_back() -> None:
    arena = open_arena(GPU, 256 * MIB)
    shapes = [((16 * MIB // 4,), torch.float32), ((48 * MIB // 4,), torch.float32)]
    state = Swappable(arena, "job 1", shapes, window=8 * MIB)
    paced(state.back(), Rate())
    for tensor in state.tensors:
        tensor.normal_()
    sums = [float(tensor.double().sum()) for tensor in state.tensors]
    torch.cuda.synchronize()
    assert state.out() == 64 * MIB
    assert arena.statistics().used == 0
    assert [float(tensor.to(GPU).double().sum()) for tensor in state.contents(range(2))] == sums
    assert paced(state.back(), Rate()) == 64 * MIB
    assert [float(tensor.double().sum()) for tensor in state.tensors] == sums
