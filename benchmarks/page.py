"""Pages in docs/ whose figures are written by the program that measured them, between marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def fill(page: Path, figures: Mapping[str, str]) -> None:
    """Put each figure between ``<!-- NAME -->`` and ``<!-- /NAME -->``; one whose marks stand on lines of their own is
    put on lines of its own. Raises ValueError when a mark is missing."""
    text = page.read_text()
    for name, body in figures.items():
        before, after = _between(text, name)
        block = text[before : before + 1] == "\n"
        text = text[:before] + (f"\n{body}\n" if block else body) + text[after:]
    page.write_text(text)


def shown(page: Path, name: str) -> str:
    """What stands there at present."""
    text = page.read_text()
    before, after = _between(text, name)
    return text[before:after].strip("\n")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def _between(text: str, name: str) -> tuple[int, int]:
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    return text.index(start) + len(start), text.index(end)
