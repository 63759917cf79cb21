"""Facts about finetune jobs in the simulator: views, turns, memory, micro-batches of different sizes."""

from __future__ import annotations

import pytest

from core.errors import Invalid
from core.simulate.device import Device, Program
from core.simulate.scenario import FinetuneJob
from core.simulate.trainer import LOOKAHEAD, Trainer


def trainer(device: Device, *jobs: FinetuneJob, programs: list[Program] | None = None) -> Trainer:
    made = Trainer(jobs, programs or [Program(device)], state_pages=40, seed=0)
    made.arrive(0.0)
    return made


def test_a_lone_endless_job_shows_tasklets_beyond_its_micro_batch(small: Device) -> None:
    made = trainer(small, FinetuneJob("a"))
    made.launch("a", 4, 0.0)
    (view,) = made.views()
    assert len(view.tasklets) == LOOKAHEAD
    assert view.tasklets[:4] == ("backward", "optimizer", "forward", "forward")


def test_with_others_a_job_shows_its_micro_batch_only(small: Device) -> None:
    made = trainer(small, FinetuneJob("a"), FinetuneJob("b"))
    assert [len(view.tasklets) for view in made.views()] == [6, 6]
    made.launch("a", 2, 0.0)
    assert [(view.job_id, len(view.tasklets), view.boundary) for view in made.views()] == [
        ("a", 4, False),
        ("b", 6, True),
    ]
    with pytest.raises(Invalid, match="5 tasklets of 'a' were not shown"):
        made.launch("a", 5, 0.0)


def test_pages_are_held_from_the_first_tasklet_on(small: Device) -> None:
    made = trainer(small, FinetuneJob("a"))
    assert made.views()[0].pages == 640
    made.launch("a", 1, 0.0)
    assert (made.views()[0].pages, made.held_pages) == (0, 640)


def test_activations_go_first_then_state_and_the_micro_batch_begins_again(small: Device) -> None:
    made = trainer(small, FinetuneJob("a"))
    made.launch("a", 8, 0.0)  # one micro-batch and two tasklets
    assert made.release(100) == 600
    assert (made.held_pages, made.views()[0].pages) == (40, 600)
    assert made.views()[0].boundary
    assert (made.tokens(), made.runs[0].lost_ms) == (60, pytest.approx(2.0))
    assert made.release(100) == 40
    assert made.release(100) == 0


def test_a_job_ends_and_gives_its_pages_back(small: Device) -> None:
    made = trainer(small, FinetuneJob("a", tokens=120), FinetuneJob("b", arrival_s=1.0))
    for now in (10.0, 20.0):
        made.launch("a", 6, now)
    assert made.views() == ()
    assert made.held_pages == 0
    assert (made.done[0].trained_tokens, made.done[0].ended_ms) == (120, 20.0)
    assert made.next_ms == 1000.0
    made.arrive(1000.0)
    assert [view.job_id for view in made.views()] == ["b"]


def test_micro_batches_of_several_sizes_are_drawn_by_seed(small: Device) -> None:
    programs = [Program(small), Program(small, tokens=30)]
    assert programs[1].total_ms == pytest.approx(2.5 + 1.0)
    made = trainer(small, FinetuneJob("a"), programs=programs)
    for now in range(50):
        made.launch("a", 6, float(now))
    ended = made.runs[0]
    assert ended.micro_batches == 50
    assert 50 * 30 < ended.trained_tokens < 50 * 60
