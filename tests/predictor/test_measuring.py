"""The plan of what to measure."""

from __future__ import annotations

import numpy as np

from core.policy.types import WHOLE
from core.predictor.measuring import measurable, measuring_plan
from core.predictor.profile import Point
from core.predictor.two_stage import TwoStagePredictor
from tests.predictor.synthetic import CAPTURED, LAYOUTS, SMS, profile, step_ms

CONTEXTS = (256, 1024, 4096)
SIZES = measurable(LAYOUTS, CAPTURED, CONTEXTS, 131_072)


def test_only_what_can_be_measured_is_offered() -> None:
    assert all(size.batch * size.context <= 131_072 for size in SIZES)
    assert all(size.beside for size in SIZES if size.layout.kind == "confined")
    assert not any(size.beside for size in SIZES if size.layout == WHOLE)


def test_every_layout_is_measured_and_nothing_twice() -> None:
    plan = measuring_plan(SIZES, SMS)
    assert len(set(plan)) == len(plan) < len(SIZES)
    assert {(size.layout, size.beside) for size in plan} == {(size.layout, size.beside) for size in SIZES}


def test_a_looser_tolerance_and_a_limit_make_it_shorter_and_keep_its_order() -> None:
    plan = measuring_plan(SIZES, SMS)
    assert measuring_plan(SIZES, SMS, tolerance=0.05) == plan[: len(measuring_plan(SIZES, SMS, tolerance=0.05))]
    assert measuring_plan(SIZES, SMS, most=10) == plan[:10]


def test_a_fit_to_the_plan_predicts_everything_else() -> None:
    plan = measuring_plan(SIZES, SMS)
    points = []
    for layout, batch, context, beside in plan:
        ms = step_ms(layout, batch, batch * context, beside)
        points.append(
            Point(
                layout=layout, batch=batch, kv_tokens=batch * context, max_kv=context, ms=ms, p99_ms=ms,
                beside="mix" if beside else None,
            )
        )  # fmt: skip
    predictor = TwoStagePredictor(profile().model_copy(update={"points": tuple(points)}))
    errors = [
        predictor.decode_ms(size.layout, size.batch, size.batch * size.context, size.context)
        / step_ms(size.layout, size.batch, size.batch * size.context, beside=False)
        - 1
        for size in SIZES
        if not size.beside
    ]
    assert np.quantile(np.abs(errors), 0.99) < 0.03
