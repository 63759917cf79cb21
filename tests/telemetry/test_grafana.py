"""The dashboard asks for nothing that the endpoint does not export, and shows all that it does."""

from __future__ import annotations

import json
import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from core.telemetry import interval as iv
from core.telemetry.prometheus import Totals, render
from tests.machine import ROOT
from tests.telemetry.test_interval import message

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """Sample name → labels."""
    totals = Totals()
    report = message(itl=[(9.0, 3)], tenant_itl={"acme": [(9.0, 3)]}, power_w=400.0)
    totals.add(iv.of_message(report, {None: 10.0, "acme": 10.0}))
    text = render(
        totals, jobs={"queued": 2}, targets=[("itl", 0.99, "", 45.0)], alerts={"warning": 1},
        parts=[("api", "ready", 0)], engine_ready=True, dispatcher=True,
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_query_names_metrics_and_labels_that_are_exported() -> None:
    there = exported()
    assert QUERIES
    for query in QUERIES:
        names = set(re.findall(r"\bharli_\w+", query))
        assert names, query
        assert names <= there.keys(), query
        labels = {label for name in names for label in there[name]}
        asked = set(re.findall(r"by \((\w+)\)", query)) | set(re.findall(r"[{,](\w+)=", query))
        assert asked <= labels, query


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(QUERIES)
    bare = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported()}
    assert [name for name in sorted(bare) if name not in shown] == []


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
