"""What a burst of requests waits for when finetuning has the memory: the decision comes with the first look at a queue
that does not fit, before the next batch is launched; only what the job has queued by then is waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.finetune.captured_job import CapturedJob
from core.link.messages import EngineNotice, JobUpdate, StartJob
from core.memory.moment import Moment
from core.memory.share import StaticActivations
from core.memory.swap import Scratch, Swappable
from core.policy.types import TaskletKind
from tests.finetune import small
from tests.finetune.cpu_slot import CpuSlot, on_a_cpu
from tests.runtime.overlap import PAGE, STEP_MS, Request, Serving

pytestmark = pytest.mark.usefixtures(on_a_cpu.__name__)


class Endless:
    """A job that computes nothing: its share is `state` and `activations` pages."""

    tokens_per_tasklet = 1.0
    total_steps, told, done = 1, None, False

    def __init__(self, serving: Serving, state: int, activations: int) -> None:
        self.progress = SimpleNamespace(step=0)
        arena, self._stream = serving.kv.arena, serving.stream
        scratch = Scratch(arena, "job slot")
        scratch.take((activations * PAGE,), torch.uint8)
        kept = Swappable(arena, "job slot", [((state * PAGE,), torch.uint8)])
        self._share = serving.new_share(SimpleNamespace(state=kept, activations=StaticActivations(scratch)))

    def upcoming(self, count: int) -> tuple[TaskletKind, ...]:
        return ("forward",) * count

    def launch(self, partition: int) -> TaskletKind | None:
        return "forward" if self._share.ready else None

    def start_again(self) -> Moment:
        return self._stream.record_event()

    def take_metrics(self) -> list[Any]:
        self._share.check()
        return []

    def close(self) -> None:
        self._share.close(self._stream.record_event())


def endless(state: int, activations: int) -> Any:
    return lambda serving, order: Endless(serving, state, activations)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """19 rows of 64 pages, of which a job of 440 takes 7: an H200's figures, a token for 256 of its. A prefill of 32
    tokens (8,192) takes 240 ms."""
    made = Serving(tmp_path, endless(30, 410), rows=19, columns=64, chunk=32, prefill_ms=7.5)
    yield made
    made.close()


def train(serving: Serving) -> None:
    """The job has its memory and has run for a while."""
    serving.start()
    serving.until(lambda: serving.share is not None and serving.share.ready)
    assert serving.job is not None
    launched = serving.job.queued
    serving.until(lambda: len(launched) > 50)
    serving.clock.turn(serving.clock.ms + 4000.0)
    serving.until(lambda: len(launched) > 100)


def told(serving: Serving) -> list[dict[str, float]]:
    """Of each reclaim: ms from the first request's wait to its decision, to the end of what was queued, until the
    activations (where more is taken) and all pages were free, the KV cache had them, and the request ran."""
    serving.runtime._report(serving.clock())
    serving.receive()
    found = []
    for message in serving.received:
        if isinstance(message, EngineNotice) and "first waited" in message.message:
            free = re.search(r"free (-?\d+\.\d) ms", message.message)
            assert free is not None
            moments = re.findall(r"(decided|queued|activations|cache|ran)\b[^,:]*? after (-?\d+\.\d)", message.message)
            found.append({"free": float(free[1]), "ran": 0.0} | {name: float(ms) for name, ms in moments})
    return found


def burst(serving: Serving, count: int, every_ms: float = 0.0, prompt: int = 7) -> list[Request]:
    """So many requests that come one after another from now on."""
    made = [Request(prompt, 1, serving.clock.ms + n * every_ms) for n in range(count)]
    serving.coming.extend(made)
    return made


def test_the_decision_comes_with_the_first_look_and_before_the_prefill(serving: Serving) -> None:
    """Steps run with tasklets behind them; then more requests come at once than there is room for."""
    serving.target(4 * STEP_MS)
    train(serving)
    assert serving.job is not None
    burst(serving, 1, prompt=50)
    serving.coming[0].most_new = 200
    serving.until(lambda: bool(serving.kv.running) and serving.executor.queued_ms() > 0)
    for _ in range(40):
        serving.turn()
    first = burst(serving, 60)[0]
    prefills = len(serving.prefills)
    serving.turn()
    queued_at, launched = first.at, len(serving.job.queued)
    (taken,) = [*serving.broker._taking, *serving.broker._following]
    assert taken.decided_at == queued_at / 1e3
    assert serving.prefills[prefills][0] >= queued_at, "its prefill was launched behind the decision"
    over = max(end for _, end in serving.job.queued)
    assert queued_at < over < serving.prefills[prefills][2] - 100.0
    serving.until(lambda: serving.broker.report().reclaims == 1)
    assert serving.broker.report().reclaim_ms == pytest.approx(over - queued_at)
    assert len(serving.job.queued) == launched, "nothing was added to what was queued"


def test_a_burst_is_decided_on_while_it_is_being_taken_up(serving: Serving) -> None:
    """Which takes longer than what the job has queued."""
    train(serving)
    serving.receive_ms = 0.5
    waiting = burst(serving, 120)
    serving.until(lambda: all(one.ran_at is not None for one in waiting))
    assert waiting[-1].at - waiting[0].at == pytest.approx(119 * 0.5)
    assert all(one["decided"] <= 5.0 for one in told(serving))


@pytest.mark.parametrize("target_ms", [32.0, 50.0])
def test_memory_is_back_within_what_one_step_has_behind_it(serving: Serving, target_ms: float) -> None:
    """Two steps are launched ahead, and the tasklets behind one of them."""
    serving.target(target_ms)
    train(serving)
    burst(serving, 1, prompt=50)
    serving.coming[0].most_new = 200
    serving.until(lambda: bool(serving.kv.running) and serving.executor.queued_ms() > 0)
    for _ in range(40):
        serving.turn()
    burst(serving, 60)
    serving.until(lambda: serving.broker.report().reclaims == 1)
    took_ms = serving.broker.report().reclaim_ms
    assert took_ms is not None and 0.0 < took_ms <= target_ms - STEP_MS


def test_requests_that_nothing_runs_beside_are_looked_at_again(serving: Serving) -> None:
    """SGLang is neither idle then, nor is there a step whose result would come."""
    train(serving)
    kv = serving.kv
    kv.waiting_queue.append(Request(kv.most - 40, 1, serving.clock()))
    serving.runtime.between_batches()
    assert kv.goal == kv.most > kv.size
    kv._coming.clear()  # the pages were somebody else's
    serving.clock.turn(serving.clock.ms + 25.0)
    serving.runtime.between_batches()
    assert kv.goal == kv.most
    kv.waiting_queue.clear()


def test_a_burst_that_trickles_in_beside_long_prefills_has_each_part_of_the_memory_in_time(serving: Serving) -> None:
    """As on an H200: while one prefill after another runs, the pool has to grow twice. The second time counts from when
    requests came that the first was too little for."""
    train(serving)
    waiting = burst(serving, 151, every_ms=12.0)
    serving.until(lambda: all(one.ran_at is not None for one in waiting))
    found = told(serving)
    assert len(found) == 2
    assert found[1]["queued"] <= found[1]["activations"] <= found[1]["free"], "the state too is moved then"
    assert [one["free"] for one in found] == [0.0, 0.0], "nothing was queued, and giving up takes no time here"
    assert all(one["cache"] < 250.0 <= one["ran"] for one in found), "one prefill; the queue before it takes longer"


def test_the_kv_cache_has_the_pages_when_the_next_batch_is_made(serving: Serving) -> None:
    train(serving)
    burst(serving, 80)
    serving.turn()
    size = serving.kv.size
    assert serving.kv.goal == serving.kv.most > size, "it was told with the decision"
    serving.until(lambda: serving.share is not None and serving.share.held == 0)
    serving.turn()
    assert serving.kv.size == serving.kv.most


def test_a_micro_batch_that_is_dropped_starts_again_with_the_same_losses(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"max_steps": 5, "accumulation": 2}
    alone, expected = CpuSlot(small.model(), tmp_path / "alone", None).job(small.spec(tmp_path, **spec)), []
    while not alone.done:
        alone.launch(0)
        expected += [metric.loss for metric in alone.take_metrics()]

    def prepare(serving: Serving, order: StartJob) -> CapturedJob:
        slot = CpuSlot(small.model(), tmp_path / "slot", serving.kv.arena)
        assert slot.memory is not None
        slot.streams = (serving.stream,)  # type: ignore[assignment]
        slot._new_share = lambda: serving.new_share(slot.memory)  # type: ignore[method-assign]
        return slot.job(order.spec)

    serving = Serving(tmp_path, prepare, rows=80)
    serving.start(**spec)

    def losses() -> list[float]:
        return [one.loss for one in serving.received if isinstance(one, JobUpdate) and one.loss is not None]

    def ended() -> bool:
        return any(isinstance(one, JobUpdate) and one.kind in ("succeeded", "failed") for one in serving.received)

    kv, launched = serving.kv, 0
    while not ended():
        serving.turn()
        if serving.job is not None and len(serving.job.queued) >= launched + 17:  # a step, and some of the next
            burst(serving, 5, prompt=kv.most // 5 - 5)
            serving.until(lambda: not serving.coming and not kv.waiting_queue and not kv.running)
            serving.clock.turn(serving.clock.ms + 4000.0)
            launched = len(serving.job.queued)
    assert losses() == expected
    assert serving.broker.report().reclaims >= 3
    serving.close()


def test_a_prefill_lets_finetuning_end_first_while_the_kv_cache_waits_for_its_memory(serving: Serving) -> None:
    """Beside it, tasklets would end when it does."""
    train(serving)
    executor, order = serving.executor, []
    executor.finetuning_first = lambda: order.append("tasklets")  # type: ignore[method-assign]
    burst(serving, 3)
    serving.turn()
    assert len(serving.prefills) == 1 and not order
    burst(serving, 80)
    serving.until(lambda: len(serving.prefills) == 5)
    assert serving.broker.report().reclaims == 1 and order == ["tasklets"]
