"""The paper's two-stage predictor over a measured profile, corrected online and with bounds that hold.

A prediction is the profile's (see `core.predictor.fit`) times two corrections that are learnt from every step: one of
the whole device, for what slows everything (a clock, a neighbour); one of each partition's steps, those alone and those
beside finetuning apart, slow, for what the profile got wrong there. Both are recursive least squares of one
coefficient, measured ÷ predicted, with forgetting. The device's learns what more than half of the last steps agree
about, since in some partitions one step in ten takes a fifth longer than most and none is as much shorter; it leaks
back to 1, so that what lasts ends up where it belongs. The bound is the prediction times a rolling conformal quantile
of that ratio per partition, alone or beside, and load bucket; while a bucket has too few steps, that of all its
buckets, and before that what the profile's own p99 says. A policy prefers what is bounded too low by chance, so the
steps that run miss more often than the steps that could: one factor common to all bounds rises with each miss and falls
with each step that held, which keeps the rate of those that run (adaptive conformal inference). A GPU's clock drops for
some steps about a second after it has got much to do, and all that runs then is slow together. So what a step takes
beyond its bound raises all steps' bounds at once, for the few steps that such a drop lasts, and misses soon after each
other count as one; and what all tasklets behind one step took has a quantile of its own, over the sum of their bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np

from core.errors import Invalid
from core.policy.types import WHOLE, Layout, TaskletKind
from core.predictor.fit import TwoStage
from core.predictor.online import WINDOW, Bound, Scale
from core.predictor.profile import Point, Profile
from core.predictor.slowdown import Slowdown
from core.predictor.stale import MissWatch
from core.predictor.table import FactorTable, Grid, StepTable, grid_of
from core.predictor.window import RollingQuantile

_DEVICE_FORGETTING, _OWN_FORGETTING = 0.8, 0.995
_TASKLET_FORGETTING = 0.98  # tasklets of a micro-batch are of one size, and the next one's of another
_QUIET = 0.06  # up to so far off a step tells of its own partition and load, what is beyond tells of the device
_DEVICE_VARIANCE, _OWN_VARIANCE = 0.1, 1.0  # a partition's first steps say what the profile got wrong there
_LATELY = 21  # steps of which more than half have to agree about the device
_SETTLED = 30  # steps after which a partition's ratio tells of the device
_LEAK = 0.001  # of the device's correction per step
_WIDEN, _NARROWEST, _WIDEST = 0.01, 0.97, 1.1  # by a miss, and how far the common factor of all bounds may go
_APART = 4  # steps after a miss in which others are taken to be of the same cause
_DEEPEST, _LASTING = 1.15, 0.5  # a drop of the clock, and what is left of it with each step that holds its bound
_PLANNED_AHEAD = 3  # steps that an engine with overlap has planned, at most, before it sees what the first one took
_TOGETHER = 1.2  # what tasklets behind a step may be late by together; more is a hiccup, which no bound is made for
_FADE_STEPS = 512  # what was not measured in so many steps begins to be forgotten
_TAIL_OCTAVES = 1.0  # reach of a measured p99 in batch and KV tokens
_FIT_ERROR = 0.03  # what a prediction between measured sizes may be off by, until steps were seen
_KINDS: tuple[TaskletKind, ...] = ("forward", "head", "backward", "optimizer")


class _Learnt:
    """What was learnt of a layout's steps alone, or of those beside tasklets of whatever kind: from how many steps,
    and at which step last. Of seventy tasklets four are heads: a bound from the few steps beside those alone is so
    high that it can keep a job, at its next head, out of a layout that holds the target, for as long as nothing runs
    there."""

    __slots__ = ("bound", "last", "scale", "steps")

    def __init__(self, prior: Sequence[float], miss: float) -> None:
        self.bound = Bound(prior, miss)
        self.scale = Scale(_OWN_FORGETTING, _OWN_VARIANCE)
        self.steps = 0
        self.last = 0


class _Surface(NamedTuple):
    """A (layout, kind beside): what the profile says of it, and what was learnt since."""

    table: StepTable
    learnt: _Learnt


class _Tasklet:
    """Tasklets of a kind in a layout: ms on the whole device, the factors on the finetune part alone and next to
    decode, and what was learnt since. relative: how many times as long those of the present job take."""

    __slots__ = ("_alone", "_beside", "_whole_ms", "bound", "relative", "scale")

    def __init__(self, whole_ms: float, alone: float, beside: FactorTable | None, prior: float, miss: float) -> None:
        self._whole_ms = whole_ms
        self._alone = alone
        self._beside = beside
        self.bound = Bound([prior], miss)
        self.scale = Scale(_TASKLET_FORGETTING, _OWN_VARIANCE)
        self.relative = 1.0

    def ms(self, padded: int, kv_tokens: int) -> float:
        """As predicted, before the bound."""
        factor = self._alone
        if padded and self._beside is not None:
            factor = self._beside.factor(padded, kv_tokens)
        return self._whole_ms * factor * self.scale.value * self.relative


class TwoStagePredictor:
    """Fitted from a profile at the start; `observe_step` and `observe_tasklet` keep it true."""

    def __init__(self, profile: Profile, miss: float = 0.01) -> None:
        """miss: share of steps that may outlast the bound. Raises `Invalid` when the profile lacks tasklets alone on
        the whole device."""
        self._grid = grid_of(profile)
        self._miss = miss
        self._count = 0
        self._device = Scale(_DEVICE_FORGETTING, _DEVICE_VARIANCE)
        self._lately: deque[float] = deque(maxlen=_LATELY)  # measured ÷ predicted without the device's correction
        self._widening = self._drop = 1.0
        self._counted = -_APART  # the step of the last miss that raised that factor
        self._raised = miss / (1 + _APART * miss)  # the share of steps that raise it when bounds are as they should be
        self._watch = MissWatch()
        # Tasklets on the whole device since the last step: what they took, and what their bounds were when that was
        # planned; such ratios; and the bounds by kind at the last steps.
        self._behind_ms = self._behind_planned_ms = 0.0
        self._behind = RollingQuantile(WINDOW, miss)
        self._planned: deque[dict[TaskletKind, float]] = deque(maxlen=_PLANNED_AHEAD)
        self._learnt: list[_Learnt] = []
        self._steps: dict[tuple[Layout, TaskletKind | None], _Surface] = {}
        self._tasklets: dict[tuple[Layout, TaskletKind], _Tasklet] = {}
        self._fit_steps(profile)
        if profile.tasklets:
            self._fit_tasklets(profile)
        self._whole = {kind: tasklet for (layout, kind), tasklet in self._tasklets.items() if layout == WHOLE}

    @property
    def stale(self) -> str:
        """Why predictions cannot be trusted at present."""
        return self._watch.reason

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that have a fit, ``whole`` first."""
        return tuple(dict.fromkeys(layout for layout, _ in self._steps))

    def distrust(self, reason: str) -> None:
        """Something changed under the predictions (a clock, an adapter rank, a captured shape): stale until enough
        steps in a row held their bounds."""
        self._watch.distrust(reason)

    def another_job(self, relative: Mapping[TaskletKind, float]) -> None:
        """Tasklets from now on take so many times as long as those that the profile was taken of; a kind that is not
        named takes as long."""
        for (_, kind), tasklet in self._tasklets.items():
            tasklet.relative = relative.get(kind, 1.0)
        self._planned.clear()

    def decode_ms(
        self, layout: Layout, padded: int, kv_tokens: int, max_kv: int = 0, beside: TaskletKind | None = None
    ) -> float:
        """One decode step as predicted, alone or beside a tasklet of the kind; never falls when batch, KV tokens or the
        longest request grow. ``inf`` outside what was measured and in a layout without a fit."""
        surface = self._steps.get((layout if beside is not None else _alone(layout), beside))
        if surface is None:
            return inf
        return surface.table.ms(padded, kv_tokens, max_kv) * surface.learnt.scale.value * self._device.value

    def decode_upper_ms(
        self, layout: Layout, padded: int, kv_tokens: int, beside: TaskletKind | None, max_kv: int = 0
    ) -> float:
        """Upper bound of a step, with the miss rate that was asked for. ``inf`` where `decode_ms` is."""
        surface = self._steps.get((layout if beside is not None else _alone(layout), beside))
        if surface is None:
            return inf
        table, learnt = surface
        ms, bucket = table.look_up(padded, kv_tokens, max_kv)
        common = self._device.value * self._widening * self._drop
        return ms * learnt.scale.value * common * learnt.bound.factors[bucket]

    def tasklet_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """Upper bound of a tasklet on the layout's finetune part. ``inf`` for what was not measured."""
        tasklet = self._tasklets.get((layout, kind))
        if tasklet is None:
            return inf
        together = max(1.0, self._behind.value or 1.0) if layout == WHOLE else 1.0
        return tasklet.ms(padded, kv_tokens) * tasklet.bound.factors[0] * together

    def tasklet_mean_ms(self, layout: Layout, kind: TaskletKind, padded: int = 0, kv_tokens: int = 0) -> float:
        """As predicted. ``inf`` for what was not measured."""
        tasklet = self._tasklets.get((layout, kind))
        return tasklet.ms(padded, kv_tokens) if tasklet is not None else inf

    def observe_step(
        self,
        layout: Layout,
        padded: int,
        kv_tokens: int,
        ms: float,
        beside: TaskletKind | None = None,
        max_kv: int = 0,
    ) -> bool:
        """Learn one step; True when it outlasted its bound. Steps outside the grid teach nothing."""
        if self._behind_planned_ms:
            self._behind.push(min(self._behind_ms / self._behind_planned_ms, _TOGETHER))
            self._behind_ms = self._behind_planned_ms = 0.0
        self._planned.append({kind: one.ms(0, 0) * one.bound.factors[0] for kind, one in self._whole.items()})
        surface = self._steps.get((layout if beside is not None else _alone(layout), beside))
        if surface is None:
            return False
        table, learnt = surface
        predicted, bucket = table.look_up(padded, kv_tokens, max_kv)
        if predicted == inf:
            return False
        device = self._device
        ratio = ms / (predicted * learnt.scale.value * device.value)
        beyond = ratio / (learnt.bound.factors[bucket] * self._widening)
        missed = beyond > self._drop
        counts = missed and self._count - self._counted > _APART
        widening = self._widening + _WIDEN * (counts - self._raised)
        self._widening = min(max(widening, _NARROWEST), _WIDEST)
        if counts:
            self._counted = self._count
        held = 1 + _LASTING * (self._drop - 1)
        self._drop = held if beyond <= 1 else min(max(self._drop, beyond), _DEEPEST)
        learnt.bound.learn(bucket, ratio)
        learnt.scale.learn(ratio)
        learnt.steps += 1
        if learnt.steps > _SETTLED:
            self._lately.append(ratio * device.value)
            common = median(self._lately) / device.value
            device.learn(1 + common - min(max(common, 1 - _QUIET), 1 + _QUIET))
            device.value += _LEAK * (1 - device.value)
        self._count = learnt.last = self._count + 1
        if self._count % _FADE_STEPS == 0:
            for other in self._learnt:
                if other.steps and other.last <= self._count - _FADE_STEPS:
                    other.bound.fade()
        self._watch.see(missed)
        return missed

    def observe_tasklet(
        self, layout: Layout, kind: TaskletKind, ms: float, padded: int = 0, kv_tokens: int = 0
    ) -> None:
        """Learn one tasklet."""
        tasklet = self._tasklets.get((layout, kind))
        predicted = tasklet.ms(padded, kv_tokens) if tasklet is not None else inf
        if tasklet is None or predicted == inf:
            return
        if layout == WHOLE and self._planned:
            self._behind_ms += ms
            self._behind_planned_ms += self._planned[0][kind]
        tasklet.bound.learn(0, ms / predicted)
        tasklet.scale.learn(ms / predicted)

    def _fit_steps(self, profile: Profile) -> None:
        """Tables and bounds of every (layout, kind); a kind that was not measured by itself takes what was measured
        with all kinds in turn."""
        points = profile.points
        alone = [point for point in points if point.beside is None]
        for layout, (table, prior) in self._tables(profile, list(points), beside=False).items():
            self._steps[layout, None] = _Surface(table, self._nothing_yet(prior))
        fitted = {
            kind: self._tables(profile, alone + [p for p in points if p.beside == kind], beside=True)
            for kind in {point.beside for point in points} - {None}
        }
        of_kinds = {kind: fitted.get(kind, fitted.get("mix", {})) for kind in _KINDS}
        for layout in {layout: None for tables in of_kinds.values() for layout in tables}:
            found = {kind: tables[layout] for kind, tables in of_kinds.items() if layout in tables}
            learnt = self._nothing_yet(np.max([prior for _, prior in found.values()], axis=0).tolist())
            for kind, (table, _) in found.items():
                self._steps[layout, kind] = _Surface(table, learnt)

    def _nothing_yet(self, prior: Sequence[float]) -> _Learnt:
        self._learnt.append(_Learnt(prior, self._miss))
        return self._learnt[-1]

    def _tables(
        self, profile: Profile, points: list[Point], *, beside: bool
    ) -> dict[Layout, tuple[StepTable, list[float]]]:
        """Fit `points`; layout → table of its steps alone or beside, and what p99 is of the fit in each load bucket."""
        sms, grid = profile.machine.sms, self._grid
        model = TwoStage(points, sms, profile.kv_heads)
        tables: dict[Layout, tuple[StepTable, list[float]]] = {}
        for layout in dict.fromkeys(p.layout for p in points if (p.beside is not None) == beside):
            by_kv = model.ms(grid.by_kv_tokens(layout, beside))
            by_queue = model.ms_of_queue(grid.by_queue(layout, beside))
            if beside:  # finetuning does not make decode faster
                by_kv = np.maximum(by_kv, model.ms(grid.by_kv_tokens(_alone(layout), False)))
            table = StepTable(grid, layout, by_kv, by_queue)
            own = [p for p in points if p.layout == layout and (p.beside is not None) == beside]
            tables[layout] = (
                table,
                _tails(grid, own, [p.p99_ms / table.ms(p.batch, p.kv_tokens, p.max_kv) for p in own]),
            )
        return tables

    def _fit_tasklets(self, profile: Profile) -> None:
        sms, grid = profile.machine.sms, self._grid
        try:
            slow = Slowdown(profile.tasklets, sms)
        except ValueError as error:
            raise Invalid("bad_profile", f"profile: {error}; `harli profile` makes a new one", "profile") from error
        tails: dict[Layout, float] = {}
        for point in profile.tasklets:
            tails[point.layout] = max(point.p99_ms / point.ms, tails.get(point.layout, 1.0))
        for layout in dict.fromkeys([WHOLE, *(layout for layout, kind in self._steps if kind is not None)]):
            beside = None
            if layout != WHOLE:
                beside = FactorTable(grid, slow.factors(grid.by_kv_tokens(layout, True)))
            for kind, whole_ms in slow.whole_ms.items():
                alone = 1.0 if layout == WHOLE else slow.alone.get(layout, inf)
                # Next to decode they scatter; alone on the whole device they hardly do, and there each ms counts.
                tail = tails.get(layout, max(tails.values()))
                self._tasklets[layout, kind] = _Tasklet(whole_ms, alone, beside, tail, self._miss)


def _alone(layout: Layout) -> Layout:
    """Where decode runs when nothing is beside: a confined layout gives it the whole device."""
    return WHOLE if layout.kind == "confined" else layout


def _tails(grid: Grid, points: list[Point], tails: list[float]) -> list[float]:
    """What p99 is of the prediction in each load bucket: that of the points around it, weighted by nearness."""
    batch, kv = grid.bucket_middles()
    octaves = np.hypot(
        np.log2(batch)[:, None] - np.log2([point.batch for point in points]),
        np.log2(kv)[:, None] - np.log2([point.kv_tokens for point in points]),
    )
    weights = np.exp(-((octaves / _TAIL_OCTAVES) ** 2) / 2) + 1e-3
    near: list[float] = ((1 + _FIT_ERROR) * (weights @ np.array(tails)) / weights.sum(axis=1)).tolist()
    return near
