"""Finetune jobs of a simulated engine: where each stands in its micro-batch, what it holds, what it has trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from core.errors import Invalid
from core.policy.types import JobView, TaskletKind
from core.simulate.device import Program
from core.simulate.scenario import FinetuneJob

LOOKAHEAD = 64  # tasklets of a job that a policy gets to see, at least; it always sees the rest of the micro-batch


@dataclass(slots=True)
class JobRun:
    """A job that runs: `position` in the micro-batch of `program`, `work_ms` of it launched, `pages` held."""

    job: FinetuneJob
    program: Program
    position: int = 0
    work_ms: float = 0.0
    pages: int = 0
    trained_tokens: int = 0
    micro_batches: int = 0
    lost_ms: float = 0.0
    ended_ms: float | None = None
    views: dict[tuple[int, int, bool, int], JobView] = field(default_factory=dict)


class Trainer:
    """All jobs. programs: micro-batches come in these shapes, drawn anew for each (one: all are alike)."""

    def __init__(
        self,
        jobs: Sequence[FinetuneJob],
        programs: Sequence[Program],
        state_pages: int,
        seed: int,
    ) -> None:
        if not programs:
            raise Invalid("scenario", "scenario: no micro-batch program; give at least one", "programs")
        self._programs = tuple(programs)
        self._random = np.random.default_rng([seed, 1])
        self._need = max(program.activation_pages for program in programs) + state_pages
        self._state = state_pages
        self._coming = sorted(jobs, key=lambda job: job.arrival_s)
        self.runs: list[JobRun] = []
        self.done: list[JobRun] = []
        self.held_pages = 0
        self.tasklets = 0

    def arrive(self, now_ms: float) -> None:
        """Start the jobs that came until now."""
        while self._coming and self._coming[0].arrival_s * 1e3 <= now_ms:
            self.runs.append(JobRun(self._coming.pop(0), self._draw()))

    @property
    def next_ms(self) -> float:
        """When the next job comes."""
        return self._coming[0].arrival_s * 1e3 if self._coming else float("inf")

    def views(self) -> tuple[JobView, ...]:
        """The runnable jobs, first the one whose micro-batch is open."""
        alone = len(self.runs) == 1 and self.runs[0].job.tokens is None and len(self._programs) == 1
        return tuple([self._view(run, alone) for run in self.runs])

    def launch(self, job_id: str, count: int, now_ms: float) -> float:
        """`count` next tasklets of a job are launched; their ms on the whole device.

        Errors: `Invalid` for a job that does not run or may not run now, or more tasklets than its view had.
        """
        run = next((run for run in self.runs if run.job.job_id == job_id), None)
        if run is None:
            raise Invalid("plan", f"plan: job {job_id!r} does not run; plan one of state.jobs", "job")
        if run is not self.runs[0]:
            if self.runs[0].position:
                raise Invalid("plan", f"plan: job {job_id!r} inside a step of {self.runs[0].job.job_id!r}", "job")
            self.runs.remove(run)
            self.runs.insert(0, run)
        left = len(run.program) - run.position
        if count > (max(LOOKAHEAD, left) if self._endless(run) else left):
            raise Invalid("plan", f"plan: {count} tasklets of {job_id!r} were not shown; plan those shown", "after")
        self.held_pages += self._need - run.pages
        run.pages = self._need
        work = run.program.work_ms(run.position, count)
        run.work_ms += work
        run.position += count
        self.tasklets += count
        while run.position >= len(run.program):
            self._end_micro_batch(run, now_ms)
        return work

    def kinds(self, job_id: str) -> tuple[TaskletKind, float]:
        """Kind and ms on the whole device of the job's next tasklet."""
        run = next(run for run in self.runs if run.job.job_id == job_id)
        return run.program.kinds[run.position], run.program.ms[run.position]

    def give_back(self, pages: int) -> int:
        """Free at least `pages` if the jobs hold that many: activations first (the micro-batch begins again), then what
        waiting jobs and the open one keep of their state. The pages freed."""
        freed = 0
        for keep in (self._state, 0):
            for run in reversed(self.runs):
                if freed >= pages:
                    return freed
                if run.pages > keep:
                    freed += run.pages - keep
                    run.pages = keep
                    run.lost_ms += run.work_ms
                    run.position, run.work_ms = 0, 0.0
        return freed

    def release(self, pages: int) -> int:
        """`give_back`, kept in the books."""
        freed = self.give_back(pages)
        self.held_pages -= freed
        return freed

    def tokens(self) -> float:
        """Trained tokens of all jobs, open micro-batches by the work launched."""
        ended = sum(run.trained_tokens for run in (*self.runs, *self.done))
        return ended + sum(run.work_ms / run.program.total_ms * run.program.tokens for run in self.runs)

    def _end_micro_batch(self, run: JobRun, now_ms: float) -> None:
        run.position -= len(run.program)
        run.work_ms = max(0.0, run.work_ms - run.program.total_ms)
        run.trained_tokens += run.program.tokens
        run.micro_batches += 1
        if run.job.tokens is not None and run.trained_tokens >= run.job.tokens:
            self.held_pages -= run.pages
            run.pages, run.ended_ms = 0, now_ms
            self.runs.remove(run)
            self.done.append(run)
        elif len(self._programs) > 1:
            run.program = self._draw()

    def _draw(self) -> Program:
        if len(self._programs) == 1:
            return self._programs[0]
        return self._programs[int(self._random.integers(len(self._programs)))]

    def _endless(self, run: JobRun) -> bool:
        return len(self.runs) == 1 and run.job.tokens is None and len(self._programs) == 1

    def _view(self, run: JobRun, endless: bool) -> JobView:
        pages = self._need - run.pages
        key = (run.position, pages, endless, id(run.program))
        view = run.views.get(key)
        if view is None:
            job, program = run.job, run.program
            kinds = program.kinds[run.position :]
            if endless and len(kinds) < LOOKAHEAD:
                kinds = (kinds + program.kinds * (1 + LOOKAHEAD // len(program)))[:LOOKAHEAD]
            view = run.views[key] = JobView(
                job.job_id, kinds, job.tenant, job.weight, job.priority,
                program.tokens / len(program), job.deadline_s, pages, run.position == 0,
            )  # fmt: skip
        return view
