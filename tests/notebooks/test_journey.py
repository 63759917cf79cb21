"""The notebook of the journey runs from top to bottom against a running Harli."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.machine import ROOT
from tests.stack import Stack, environment

JOURNEY = ROOT / "notebooks" / "journey.ipynb"
_CELL_TIMEOUT_S = 480
_STAMPED = re.compile(r"captain-\d{8}-\d{6}$")


def outputs(notebook: nbformat.NotebookNode) -> str:
    """What all cells showed as text."""
    texts: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts.extend(str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/"))
    return "\n".join(texts)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.engine
def test_the_journey_ends_with_an_adapter_that_answers(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(stack.settings).items():
        monkeypatch.setenv(name, value)
    targets = stack.client.targets().targets
    notebook = nbformat.read(JOURNEY, as_version=4)
    NotebookClient(
        notebook, timeout=_CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(JOURNEY.parent)}}
    ).execute()
    text = outputs(notebook)
    assert "217 rows read as" in text
    assert "in force in the engine after" in text
    assert "succeeded" in text
    (job,) = [job for job in stack.client.jobs(state="succeeded").items if _STAMPED.match(job.adapter_name)]
    assert job.first_loss is not None
    assert job.loss is not None
    assert job.loss < job.first_loss / 2
    assert "Aye" in text, "the adapter does not answer in the captain's style"
    assert stack.client.targets().targets == targets
