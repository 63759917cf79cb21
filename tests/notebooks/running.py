"""Running a notebook from top to bottom, with small parameters."""

from __future__ import annotations

import re
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.machine import ROOT

NOTEBOOKS = ROOT / "notebooks"
_CELL_TIMEOUT_S = 400


def run(name: str, **parameters: Any) -> str:
    """Execute a notebook with other values in its parameters cell; what its cells showed as text."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (chosen,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for parameter, value in parameters.items():
        assert re.search(rf"^{parameter} = ", chosen.source, re.MULTILINE), f"{name} has no parameter {parameter}"
        chosen.source += f"\n{parameter} = {value!r}"
    NotebookClient(
        notebook, timeout=_CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute()
    texts: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts.extend(str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/"))
    return "\n".join(texts)
