"""What a job's figures say about its speed and end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest

from app.ui.states import ENDED, PAUSABLE, RESUMABLE, job_tone, progress_cell, remaining, seconds_per_step, state_cell
from core.api.schemas import ErrorDetail, Job, JobCreate, JobMetric, JobState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job(state: JobState = "running", **more: object) -> Job:
    spec = JobCreate(dataset="rows", adapter_name="captain")
    return Job.model_validate(
        {
            "id": "job_1", "name": "n", "state": state, "spec": spec, "dataset_id": "ds_1", "dataset_name": "rows",
            "adapter_name": "captain", "created_at": NOW, **more,
        }
    )  # fmt: skip


def metrics(steps: int, seconds: float) -> list[JobMetric]:
    return [JobMetric(step=n, time=NOW + timedelta(seconds=n * seconds), loss=1.0) for n in range(1, steps + 1)]


def test_the_speed_is_of_the_last_steps() -> None:
    slow_then_fast = [*metrics(100, 10.0), *metrics(130, 2.0)[100:]]
    assert seconds_per_step(slow_then_fast) == pytest.approx(2.0)


def test_one_step_has_no_speed() -> None:
    assert seconds_per_step(metrics(1, 1.0)) is None


def test_the_time_left_is_steps_left_at_that_speed() -> None:
    assert remaining(job(step=40, total_steps=100), metrics(40, 2.0)) == "2 min 0 s"


@pytest.mark.parametrize("state", sorted(set(get_args(JobState)) - {"running"}))
def test_a_job_that_does_not_run_has_no_time_left(state: JobState) -> None:
    assert remaining(job(state, step=40, total_steps=100), metrics(40, 2.0)) == "–"


@pytest.mark.parametrize("state", get_args(JobState))
def test_every_state_has_a_tone(state: JobState) -> None:
    assert job_tone(state)


def test_a_state_that_ends_allows_neither_pause_nor_resume() -> None:
    assert not ENDED & (PAUSABLE | RESUMABLE)


def test_a_failed_job_shows_its_error_and_a_waiting_one_its_reason() -> None:
    failed = job("failed", error=ErrorDetail(code="engine_oom", message="out of memory"), waiting_reason="x")
    assert state_cell(failed).note == "out of memory"
    assert state_cell(job("queued", waiting_reason="number 2 in the queue")).note == "number 2 in the queue"


def test_progress_without_a_known_end_is_the_step() -> None:
    assert progress_cell(job(step=3)).text == "3"
    assert progress_cell(job(step=3, total_steps=6)).share == 0.5
