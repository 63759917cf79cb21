"""The broker at work on a real arena: a job waits for its pages, gets them, and gives them up for requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.finetune.trainer import Trainer
from core.link.messages import JobUpdate
from core.memory import _arena
from core.memory.arena import Arena, OutOfMemory
from core.memory.broker import Marks
from core.memory.rows import Rows
from core.memory.share import JobShare
from core.runtime.job import JobRun
from core.runtime.memory import Broker
from tests.finetune import small

PAGE = 4096
ROW = 32  # tokens of 128 bytes in a page
ROWS = 40


class Kv:
    """A KV pool of two columns that changes its size at once; `held` and `need` are the test's to set."""

    def __init__(self) -> None:
        self.arena: Arena = _arena.memfd_arena(PAGE, 2 * ROWS)
        self._rows = Rows(self.arena, "kv cache", [128, 128], ROW * ROWS)
        self._rows.resize(ROWS)
        self.held = self.need = 0
        self.row_tokens = ROW

    @property
    def size(self) -> int:
        return self.slots_of(self._rows.rows)

    @property
    def goal(self) -> int:
        return self.size

    @property
    def most(self) -> int:
        return ROW * ROWS - 1

    @property
    def free(self) -> int:
        return self.size - self.held

    def rows_of(self, tokens: int) -> int:
        return min(ROWS, self._rows.rows_of(tokens + 1))

    def slots_of(self, rows: int) -> int:
        return self._rows.tokens_of(rows) - 1

    def pages_of(self, tokens: int) -> int:
        return self._rows.pages_of(self.rows_of(tokens))

    def fewest(self) -> int:
        return max(self.need, ROW - 1)

    def resize(self, tokens: int) -> int:
        self._rows.resize(self.rows_of(tokens))
        return self.size


class Bench:
    def __init__(self) -> None:
        self.kv = Kv()
        self.now = 100.0
        self.restarts = self.left = 0
        self.broker = Broker(self.kv, Marks(), clock=lambda: self.now)

    def look(self, running: int = 0, queued: int = 0) -> None:
        self.now += 1.0
        self.broker.look(
            running=running, queued=queued, step_ms=lambda: 100.0, restart=self._restart, stand_back=self._stand_back
        )

    def _restart(self) -> None:
        self.restarts += 1

    def _stand_back(self) -> None:
        self.left += 1

    def job(self, pages: int = 10) -> JobShare:
        return self.broker.share("1", pages * PAGE, [torch.zeros(1)])

    def held(self) -> dict[str, int]:
        return {one.name: one.bytes // PAGE for one in self.broker.report().owners}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_job_waits_until_the_kv_cache_has_given_up_what_it_wants(bench: Bench) -> None:
    bench.job()
    assert bench.broker.waiting == "waits for 0 MiB that the KV cache has"
    bench.look()
    assert (bench.kv.size, bench.broker.waiting is None) == (35 * ROW - 1, False)
    bench.look()
    assert bench.broker.waiting is None and bench.held() == {"kv cache": 70, "job 1": 10}
    assert [code for code, _ in bench.broker.news()] == ["kv_shrinks", "memory_granted"]
    assert bench.broker.news() == []


def test_requests_take_back_what_the_open_micro_batch_holds(bench: Bench) -> None:
    share = bench.job()
    bench.look()
    bench.look()
    share.grant(0)
    bench.kv.resize(25 * ROW - 1)
    share.grant(20)
    bench.kv.held = 24 * ROW
    bench.look()
    assert (bench.restarts, bench.left, share.held) == (1, 0, 10)
    assert bench.kv.size == 30 * ROW - 1
    assert [code for code, _ in bench.broker.news()][-2:] == ["memory_reclaimed", "kv_grows"]


def test_a_request_larger_than_what_is_left_sends_the_job_away(bench: Bench) -> None:
    share = bench.job(pages=40)
    bench.look()
    bench.look()
    assert share.held == 40
    bench.kv.need = 39 * ROW
    bench.look(queued=39 * ROW)
    assert bench.left == 1 and bench.restarts == 0
    share.close()
    bench.look()
    assert bench.kv.size == bench.kv.most


def test_after_a_job_the_kv_cache_has_everything_again(bench: Bench) -> None:
    share = bench.job()
    bench.look()
    bench.look()
    share.close()
    bench.look()
    assert bench.held() == {"kv cache": 80, "job 1": 0} and bench.kv.size == bench.kv.most


def test_what_can_never_be_had_is_out_of_memory(bench: Bench) -> None:
    with pytest.raises(OutOfMemory, match="take 61 pages, of which a job can get 60"):
        bench.job(pages=61)


def test_a_job_that_stands_back_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    told: list[JobUpdate] = []
    spec = small.spec(tmp_path)
    job = JobRun("engine", spec, 1, lambda: Trainer(small.model(), spec, small.rows(), base_name="small"), told.append)
    until(job, lambda: job.view() is not None)
    while not any(update.kind == "metric" for update in told):
        job.run_next()
    job.run_next()
    job.start_again()
    job.stand_back()
    until(job, lambda: job.ended)
    assert (told[-1].kind, told[-1].step) == ("interrupted", 1)
    assert told[-1].path is not None and (Path(told[-1].path) / "optimizer.safetensors").exists()


def until(job: JobRun, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done() and time.monotonic() < deadline:
        job.poll()
        time.sleep(0.001)
    assert done()


def test_a_policy_is_told_what_kv_cache_and_finetuning_leave_and_what_a_page_would_hold(bench: Bench) -> None:
    bench.look()
    free, tokens = bench.broker.room
    assert tokens == ROW / 2  # a row of two columns is two pages
    assert free == 2 * ROWS - bench.kv.pages_of(0)
    bench.kv.held = 10 * ROW
    assert bench.broker.room[0] == free - (bench.kv.pages_of(10 * ROW) - bench.kv.pages_of(0))
