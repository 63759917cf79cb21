"""Every command's help has examples, and they are commands that exist."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from core.cli import app
from core.cli_examples import EXAMPLES


def leaves(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name in inner or ():
        yield from leaves(inner[name], f"{path} {name}".strip())


COMMANDS = dict(leaves(typer.main.get_command(app)))


def test_every_command_has_examples_and_no_other_has() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_can_be_typed_as_they_are(path: str) -> None:
    for line in EXAMPLES[path]:
        program, *words = shlex.split(line)
        steps = path.split()
        assert [program, *words[: len(steps)]] == ["harli", *steps]
        COMMANDS[path].make_context(path, words[len(steps) :])


def test_help_shows_them_as_lines() -> None:
    said = CliRunner().invoke(app, ["submit", "--help"]).stdout
    assert "\n    harli submit --dataset rows.jsonl --adapter support-bot --watch\n" in said
