"""A validator's report: what was found, how often, and where first."""

from __future__ import annotations

import streamlit as st

from app.ui.table import Cell
from app.ui.text import counted, number, plain
from core.api.schemas import DatasetReport


def verdict(report: DatasetReport) -> Cell:
    """The report in two words, for a table."""
    errors = sum(finding.count for finding in report.findings if finding.level == "error")
    warnings = sum(finding.count for finding in report.findings if finding.level == "warning")
    if errors:
        return Cell(counted(errors, "error"), tone="bad")
    return Cell(counted(warnings, "remark"), tone="warn") if warnings else Cell("clean", tone="good")


def show_findings(report: DatasetReport) -> None:
    """Per reason the count, the first places and examples; errors first."""
    for finding in sorted(report.findings, key=lambda finding: finding.level != "error"):
        box, icon = (st.error, ":material/error:") if finding.level == "error" else (st.warning, ":material/warning:")
        examples = "".join(f"\n- {plain(example)}" for example in finding.examples)
        box(f"**{number(finding.count)} × {plain(finding.message)}** `{finding.code}`{examples}", icon=icon)
