"""What the pages refer to is there: other pages and their headings, files, pictures, settings, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from core.cli import app
from core.config import Settings
from tests.machine import ROOT
from tests.test_repository import tracked

PAGES = tracked(".md")
FOLDERS = ("app", "benchmarks", "core", "db", "docs", "notebooks", "requirements", "sample_data", "scripts", "tests")
# Set for tests, builds and shells rather than for a running Harli.
NOT_SETTINGS = {"HARLI_SCREENSHOTS", "HARLI_EXAMPLES", "HARLI_SANITIZE"}


def place(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(page: Path) -> list[str]:
    """Of its links and pictures."""
    return re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)[)\"]", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target in targets(page):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            dead.append(target)
    assert dead == []


def test_every_page_and_picture_is_linked() -> None:
    linked = {(page.parent / target.partition("#")[0]).resolve() for page in PAGES for target in targets(page)}
    docs = ROOT / "docs"
    there = {*docs.glob("*.md"), *docs.glob("screenshots/*.png")} - {docs / "README.md"}
    assert {place(path) for path in there - linked} == set()


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_every_file_that_is_named_in_code_is_there(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[^`\s*]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def settings(model: type[BaseModel], prefix: str = "HARLI_") -> set[str]:
    """The environment's names of all settings."""
    found = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= settings(kind, f"{prefix}{name.upper()}__")
        found.add(f"{prefix}{name.upper()}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_every_setting_is_one(page: Path) -> None:
    named = set(re.findall(r"HARLI_[A-Z0-9_]+", page.read_text()))
    assert named - settings(Settings) - NOT_SETTINGS == set()


def commands(page: Path) -> list[str]:
    """`harli ...` in its code, and as lines of its blocks."""
    text = page.read_text().replace("\\\n", " ")
    inline = re.findall(r"`(harli [^`\n]+)`", text)
    lines = re.findall(r"^(?: {4})?(harli [^\n]+)$", text, re.MULTILINE)
    typed = [line for line in lines if " is " not in line and " = " not in line]
    return [*inline, *(re.sub(r"\s+#.*| \| .*", "", line) for line in typed)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=place)
def test_every_command_can_be_typed(page: Path) -> None:
    for line in commands(page):
        command: Any = typer.main.get_command(app)
        words = shlex.split(line)[1:]
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        names = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        used = {word.partition("=")[0] for word in words if word.startswith("-") and not word.lstrip("-").isdecimal()}
        assert used <= names, f"{line}: there are {sorted(names)}"
        if getattr(command, "commands", None) is not None:
            rest = [word for word in words if not word.startswith("-")]
            assert rest in ([], ["COMMAND"]), f"{line}: {rest[0]} is no command"
