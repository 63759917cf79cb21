"""The broker at work on a real arena: a job waits for its pages, gets them, gives them up for requests, and ends as one
that was left alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.finetune.metered import MeteredTrainer
from core.finetune.trainer import Trainer
from core.link.messages import JobUpdate
from core.memory import _arena
from core.memory.arena import Arena, OutOfMemory
from core.memory.broker import Marks
from core.memory.rows import Rows
from core.memory.share import JobShare, Move
from core.runtime.job import JobRun
from core.runtime.memory import Broker
from tests.finetune import small
from tests.runtime.kv_rows import KvRows

PAGE = 4096
ROW = 32  # tokens of 128 bytes in a page
ROWS = 40


class Kv(KvRows):
    """A KV pool of two columns that changes its size at once, or in `advance` once there are pages for it; `held` and
    `need` are the test's to set."""

    def __init__(self, rows: int) -> None:
        self.arena: Arena = _arena.memfd_arena(PAGE, 2 * rows)
        self._rows = Rows(self.arena, "kv cache", [128, 128], ROW * rows)
        self._rows.resize(rows)
        self.held = self.need = self.queued = self.waiting = 0
        self.since = float("-inf")
        self.fresh: list[tuple[int, int]] = []
        self.row_tokens = ROW
        self._coming: list[tuple[int, Move]] = []

    @property
    def size(self) -> int:
        return self.slots_of(self._rows.rows)

    @property
    def goal(self) -> int:
        return self.slots_of(self._coming[-1][0]) if self._coming else self.size

    @property
    def most(self) -> int:
        return self._rows.tokens - 1

    @property
    def free(self) -> int:
        return self.size - self.held

    def fewest(self) -> int:
        return max(self.need, ROW - 1)

    def asked(self) -> int:
        return self.queued

    def short(self) -> tuple[str, float] | None:
        return ("a request", self.since) if self.waiting and self.queued > self.free else None

    def waits(self, request: object) -> bool:
        return self.waiting > 0

    def arrived(self) -> list[tuple[int, int]]:
        fresh, self.fresh = self.fresh, []
        return fresh

    def resize(self, tokens: int, after: Move | None = None) -> int:
        rows = self.rows_of(tokens)
        if after is not None:
            self._coming.append((rows, after))
        else:
            self._rows.resize(rows)
        return self.slots_of(rows)

    def advance(self) -> None:
        while self._coming and self._coming[0][1].query():
            self._rows.resize(self._coming.pop(0)[0])


class Bench:
    def __init__(self, rows: int = ROWS) -> None:
        self.kv = Kv(rows)
        self.now = 100.0
        self.restarts = 0
        self.broker = Broker(self.kv, Marks(), clock=lambda: self.now)
        self.share: JobShare | None = None

    def look(self, seconds: float = 1.0, restart: Callable[[], None] | None = None) -> None:
        """What changes hands is there when it returns; what depends on that comes with the next look."""
        self.now += seconds
        self.broker.look(step_ms=lambda: 100.0, restart=restart or self._restart)
        if self.share is not None:
            self.share.settle()
        self.kv.advance()

    def _restart(self) -> None:
        self.restarts += 1

    def job(self, pages: int = 10) -> JobShare:
        state = torch.arange(pages * PAGE // 4, dtype=torch.float32)
        self.share, self.activations = self.broker.share("1", [state], [torch.zeros(1)])
        return self.share

    def running_job(self, pages: int = 10) -> JobShare:
        share = self.job(pages)
        self.look()
        self.look()
        assert share.ready
        return share

    def held(self) -> dict[str, int]:
        return {one.name: one.bytes // PAGE for one in self.broker.report().owners}


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def roomy() -> Bench:
    """With room for a small model's job."""
    return Bench(rows=3 * ROWS)


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
    share = bench.running_job()
    bench.kv.resize(25 * ROW - 1)
    bench.activations.grant(20)
    bench.kv.held = 24 * ROW
    bench.look()
    assert (bench.restarts, share.held) == (1, 10)
    assert bench.kv.size == 30 * ROW - 1
    assert [code for code, _ in bench.broker.news()][-2:] == ["memory_reclaimed", "kv_grows"]


def test_a_request_larger_than_what_is_left_sends_the_jobs_state_to_host_memory(bench: Bench) -> None:
    share = bench.running_job(pages=40)
    content = share.state.contents([0])[0]
    bench.kv.need = bench.kv.queued = 39 * ROW
    bench.look()
    assert (share.held, share.ready, bench.restarts) == (0, False, 1)
    assert bench.kv.size >= 39 * ROW and bench.held() == {"kv cache": 80, "job 1": 0}
    code, words = next(news for news in bench.broker.news() if news[0] == "memory_reclaimed")
    assert code == "memory_reclaimed" and words.endswith("the job's state moves to host memory")
    assert bench.broker.waiting == "waits for 0 MiB that the KV cache has"
    bench.look()
    bench.look()
    assert bench.restarts == 1 and share.held == 0, "what is away is not asked for again"

    bench.kv.need = bench.kv.queued = 0
    bench.look(4.0)
    bench.look()
    assert share.ready and bench.held() == {"kv cache": 40, "job 1": 40}
    assert torch.equal(share.state.tensors[0], content[: share.state.tensors[0].numel()])


def test_requests_that_come_just_after_a_look_are_seen_at_once(bench: Bench) -> None:
    share = bench.running_job(pages=40)
    bench.kv.need = bench.kv.queued = 39 * ROW
    bench.look(0.0)
    assert share.held == 40 and not bench.broker.pressed, "nobody new waits, so there is time until the next look"
    bench.kv.waiting = 3
    assert bench.broker.pressed
    bench.look(0.0)
    assert share.held == 0 and not bench.broker.pressed, "the KV cache gets the pages without another look"
    assert bench.kv.size >= 39 * ROW


def test_a_queue_that_was_taken_up_counts_as_new_when_it_is_as_long_again(bench: Bench) -> None:
    bench.running_job()
    bench.kv.waiting = 3
    bench.look(0.0)
    bench.kv.waiting = 2
    bench.broker.batch_made()  # with the first of them
    assert not bench.broker.pressed
    bench.kv.waiting = 3
    assert bench.broker.pressed


@pytest.mark.parametrize(
    ("queued", "before", "took_ms"), [(True, 0, 1250), (True, ROW, 1500), (False, 0, 500)],
    ids=["the first request had to wait", "those that waited no longer fitted", "of the decision"],
)  # fmt: skip
def test_how_long_a_reclaim_took_counts_from_the_moment(
    bench: Bench, queued: bool, before: int, took_ms: float
) -> None:
    share = bench.running_job(pages=40)
    assert (bench.broker.report().reclaims, bench.broker.report().reclaim_ms) == (0, None)
    bench.kv.need = bench.kv.queued = 39 * ROW
    bench.kv.waiting, bench.kv.since = int(queued), bench.now + 0.25
    if before:  # that one is in the queue from long ago, for a prefill: there was room for it at the last look
        bench.kv.need = bench.kv.queued = before
        bench.kv.since = bench.now - 5.0
        bench.look(0.5)
        bench.kv.need = bench.kv.queued = 39 * ROW
    share._order(lambda: time.sleep(0.05), (share.state.pages, 0))  # what is queued takes its time
    bench.look(restart=lambda: setattr(bench, "now", bench.now + 0.5))
    bench.now += 7.0  # nobody looked for so long
    bench.look(0.0)
    said = bench.broker.report()
    assert (said.reclaims, said.reclaim_ms) == (1, pytest.approx(took_ms))
    bench.look()
    assert bench.broker.report().reclaims == 1


def test_a_reclaim_counts_from_requests_that_what_was_on_its_way_did_not_do_for(bench: Bench) -> None:
    """Those before are the business of the reclaim before."""
    share = bench.running_job(pages=10)
    bench.kv.resize(25 * ROW - 1)
    bench.activations.grant(20)
    bench.kv.since, bench.kv.waiting, bench.kv.queued = bench.now, 1, 26 * ROW
    bench.look(0.125)
    assert share.held == 10 and bench.restarts == 1, "the activations are enough"
    bench.kv.waiting, bench.kv.queued = 2, 36 * ROW
    bench.look(0.5)  # the engine was behind a prefill
    bench.look(0.5)
    said = bench.broker.report()
    assert (share.held, said.reclaims) == (0, 2)
    assert said.reclaim_ms == pytest.approx(500.0), "since the last look, at which the one before had room"
    bench.kv.waiting, bench.kv.queued = 0, 0
    bench.look(0.5)
    told = [words for code, words in bench.broker.news() if code == "memory_reclaimed" and "first waited" in words]
    for words, free, ran in zip(told, (125, 500), (1625, 1500), strict=True):
        assert f"were free {free}.0 ms after" in words and words.endswith(f"the request ran after {ran}.0")


def test_nothing_is_granted_twice_while_pages_are_on_their_way(bench: Bench) -> None:
    share = bench.running_job(pages=40)
    share.swap_out()
    share.settle()
    claim = bench.kv.arena.claim("other", 30)
    bench.look()
    assert share.held == 0, "it gets all that it wants or nothing"
    claim.resize(0)
    share._order(lambda: time.sleep(0.05), (0, 0))
    assert bench.broker.waiting == "its memory is on its way" and bench.broker.due
    bench.look()
    assert share.held == 0
    bench.look()
    assert share.held == 40


def test_arrivals_seen_lately_are_reckoned_with_before_they_come(bench: Bench) -> None:
    share = bench.running_job(pages=20)
    bench.kv.held = 20 * ROW
    bench.look()
    assert bench.kv.size == 30 * ROW - 1
    for _ in range(10):
        bench.kv.fresh = [(7 * ROW, 10)]
        bench.look()
    assert bench.restarts == 1 and not share.ready, "seven rows a second, before one of them had to wait"
    assert bench.kv.size > 34 * ROW


def test_after_a_job_the_kv_cache_has_everything_again(bench: Bench) -> None:
    share = bench.running_job()
    share.close()
    share.settle()
    del share
    bench.share = None
    assert bench.broker.due
    bench.look()
    assert not bench.broker.due
    gc.collect()
    assert bench.held()["kv cache"] == 80 and bench.kv.size == bench.kv.most
    assert sum(bench.held().values()) == 80


def test_the_next_job_begins_when_the_one_before_has_left(bench: Bench) -> None:
    """One that goes on has the same name in the arena's books."""
    share = bench.running_job()
    share._order(lambda: time.sleep(0.05), (share.state.pages, 0))  # what is queued takes its time
    share.close()
    following = bench.job()
    assert bench.held()["job 1"] == 0 and not share.moving
    bench.look()
    bench.look()
    assert following.ready and bench.held() == {"kv cache": 70, "job 1": 10}


def test_what_can_never_be_had_is_out_of_memory_and_the_remedy_is_named(bench: Bench) -> None:
    with pytest.raises(OutOfMemory, match=r"take 61 pages, of which a job can get 60; .*engine\.max_total_tokens"):
        bench.job(pages=61)


def run_among_bursts(bench: Bench, job: JobRun, period: int, *, calm: int) -> None:
    """Run the job to its end; of each `period` tasklets the first `calm` run undisturbed, then requests want everything
    for a while."""
    ran = 0
    while not job.ended:
        job.poll()
        bench.look(4.0, job.start_again)  # type: ignore[arg-type]
        if bench.broker.waiting is None and job.view() is not None and not job.ended:
            job.run_next()
            ran += 1
        busy = ran % period > calm
        if busy and bench.kv.need == 0:
            ran += period - calm
        bench.kv.need = bench.kv.queued = bench.kv.most if busy else 0


def metered(bench: Bench, path: Path, **changes: object) -> tuple[JobRun, list[JobUpdate]]:
    """A small job in the bench's arena, that has begun to run."""
    told: list[JobUpdate] = []
    spec = small.spec(path, **changes)

    def prepare() -> Trainer:
        model = small.model()

        def new_share(state: object) -> object:
            bench.share, bench.activations = bench.broker.share("1", state, model.parameters())  # type: ignore[arg-type]
            return bench.share, bench.activations

        return MeteredTrainer(model, spec, small.rows(), base_name="small", new_share=new_share)  # type: ignore[arg-type]

    job = JobRun("engine", spec, 1, prepare, told.append)
    until(job, lambda: job.view() is not None)
    return job, told


def steps(told: list[JobUpdate]) -> int:
    return sum(update.loss is not None for update in told)


def test_a_job_whose_memory_is_taken_and_given_back_has_the_losses_of_one_left_alone(
    roomy: Bench, tmp_path: Path
) -> None:
    bench = roomy
    alone = Trainer(small.model(), small.spec(tmp_path), small.rows(), base_name="small")
    losses = []
    while not alone.done:
        alone.run_next()
        losses += [metric.loss for metric in alone.take_metrics()]
    job, told = metered(bench, tmp_path)
    run_among_bursts(bench, job, 25, calm=10)
    assert [update.loss for update in told if update.loss is not None] == losses
    reclaimed = [words for code, words in bench.broker.news() if code == "memory_reclaimed"]
    assert len(reclaimed) > 3 and any("host memory" in words for words in reclaimed)
    assert bench.share is not None and bench.share.swapped_bytes > 6 * PAGE
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    alone.snapshot().save_adapter(tmp_path / "alone")
    expected = load_file(tmp_path / "alone/adapter_model.safetensors")
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.parametrize("order", ["pause", "cancel", "interrupt"])
@pytest.mark.parametrize("away", [False, True])
def test_however_a_job_ends_the_arena_is_as_before_it(order: str, away: bool, roomy: Bench, tmp_path: Path) -> None:
    bench = roomy
    job, told = metered(bench, tmp_path)
    while steps(told) < 2:
        bench.look(4.0)
        if bench.broker.waiting is None:
            job.run_next()
        job.poll()
    if away:
        bench.kv.need = bench.kv.queued = bench.kv.most
        bench.look(restart=job.start_again)  # type: ignore[arg-type]
        assert bench.share is not None and bench.share.state.mapped == 0
    {"pause": job.pause, "cancel": lambda: job.stop(save=False), "interrupt": job.interrupt}[order]()
    until(job, lambda: job.ended)
    assert bench.share is not None
    bench.share.settle()
    assert bench.held()["kv cache"] + bench.broker._spare() == 6 * ROWS and bench.share.held == 0
    if order != "cancel":
        path = told[-1].path
        assert path is not None and told[-1].step == 2
        again = MeteredTrainer(
            small.model(), job.spec, small.rows(), base_name="small", resume_from=Path(path),
            new_share=lambda state: bench.broker.share("2", state, []),
        )  # fmt: skip
        assert again.progress.step == 2
        again.close()
        again.share.settle()
    assert bench.kv.arena.statistics().used == bench.held()["kv cache"]


def test_a_job_that_can_never_fit_ends_with_what_to_do_about_it(bench: Bench, tmp_path: Path) -> None:
    job, told = metered(bench, tmp_path, micro_batch_tokens=128)
    while not job.ended:
        bench.look(4.0, job.start_again)  # type: ignore[arg-type]
        if bench.broker.waiting is None:
            job.run_next()
        job.poll()
    assert (told[-1].kind, told[-1].code) == ("failed", "out_of_memory")
    assert "engine.max_total_tokens" in (told[-1].message or "")
    assert bench.share is not None
    bench.share.settle()
    assert bench.share.held == 0


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
