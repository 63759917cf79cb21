"""Jobs side by side: what they were asked with differently, and their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.api import schemas
from core.api.job_schemas import JobComparison
from core.control.context import Control
from core.control.jobs import require, views
from db import jobs as rows

_STEPS = 1000
_ALL = 1_000_000
# What says how a job is run, not what it learns.
_UNRELATED = frozenset({"priority", "deadline", "deploy", "preset", "sample_prompts", "sample_tokens", "name"})


def compare(control: Control, job_ids: Sequence[str]) -> JobComparison:
    """In the order of the ids, each once. Raises NotFound for one that there is not."""
    with control.store.read() as session:
        found = [require(session, job_id) for job_id in dict.fromkeys(job_ids)]
        shown = views(session, found)
        metrics = {
            job.id: [
                schemas.JobMetric.model_validate(row, from_attributes=True)
                for row in thinned(rows.metrics(session, job.id, -1, _ALL))
            ]
            for job in found
        }
    specs = [_flat({**job.spec, "dataset": f"{job.dataset_name} ({job.dataset_id})"}) for job in found]
    return JobComparison(jobs=shown, differing=differing(specs), metrics=metrics)


def differing(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The fields that do not have one value throughout, with each one's; None where it has none."""
    fields = dict.fromkeys(name for spec in specs for name in spec if name not in _UNRELATED)
    values = {name: [spec.get(name) for spec in specs] for name in fields}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def thinned(metrics: Sequence[rows.JobMetricRecord]) -> list[rows.JobMetricRecord]:
    """Every n-th step, the last one, and all that were evaluated."""
    every = -(-len(metrics) // _STEPS)
    return [
        row for n, row in enumerate(metrics) if n % every == 0 or n == len(metrics) - 1 or row.eval_loss is not None
    ]


def _flat(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in spec.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
