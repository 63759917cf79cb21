"""What a captured graph runs beside other kernels, told from the times that its kernels saw."""

from __future__ import annotations

import pytest
import torch

from core.serving.branches import beside, captured_so_far

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LONG = 20_000_000  # cycles: about 10 ms


@pytest.fixture(scope="module", autouse=True)
def _bindings() -> None:
    pytest.importorskip("cuda.bindings")


class Clock:
    """Kernels that note when they run, ns, one element each."""

    def __init__(self, many: int) -> None:
        pytest.importorskip("triton")
        from tests.serving.stamp_kernel import stamp

        self._stamp = stamp
        self.seen = torch.zeros(many, dtype=torch.int64, device="cuda")
        self.note(0)  # compiled before anything is captured
        torch.cuda.synchronize()

    def note(self, n: int) -> None:
        self._stamp[(1,)](self.seen, n)


def test_outside_of_a_capture_there_is_nothing_to_run_after() -> None:
    assert captured_so_far() is None


def test_what_is_beside_does_not_wait_and_what_follows_waits_for_both() -> None:
    clock, graph = Clock(4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clock.note(0)
        before = captured_so_far()
        assert before is not None
        torch.cuda._sleep(LONG)
        with beside(before):
            clock.note(1)
        clock.note(2)
        before = captured_so_far()
        assert before is not None
        clock.note(3)
        with beside(before):
            torch.cuda._sleep(LONG)
        clock.note(0)  # the end
    graph.replay()
    torch.cuda.synchronize()
    end, near, both, short = clock.seen.tolist()
    assert both - near > 4_000_000 > short - both
    assert end - short > 4_000_000
