"""OpenAI's hyperparameters in the terms of packed micro-batches."""

from __future__ import annotations

import pytest

from core.api import schemas
from core.control.openai_jobs import accumulation
from core.errors import Invalid, Unavailable
from db.base import now


def dataset(mean_row_tokens: float | None) -> schemas.Dataset:
    report = schemas.DatasetReport(format="jsonl", rows=8, rows_read=8, mean_row_tokens=mean_row_tokens)
    return schemas.Dataset(id="ds-1", name="rivers", version=1, created_at=now(), bytes=1, sha256="0", report=report)


@pytest.mark.parametrize(("batch_size", "micro_batches"), [(None, 1), ("auto", 1), (1, 1), (2, 1), (8, 3), (64, 25)])
def test_a_batch_of_rows_becomes_the_nearest_number_of_micro_batches(
    batch_size: int | str | None, micro_batches: int
) -> None:
    assert accumulation(batch_size, dataset(100.0), 256) == micro_batches


def test_more_than_a_step_can_take_is_refused_with_what_it_can() -> None:
    with pytest.raises(Invalid, match="up to 2621"):
        accumulation(4096, dataset(100.0), 256)


def test_rows_that_nobody_counted_cannot_be_a_batch() -> None:
    with pytest.raises(Unavailable, match="batch_size"):
        accumulation(8, dataset(None), 256)
    assert accumulation("auto", dataset(None), 256) == 1
