"""Each way in is walked as `docs/entrances.md` tells it, to an adapter that answers; tests/app walk the console."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import ROOT
from tests.stack import Stack, environment

pytestmark = pytest.mark.engine
_PAGE = (ROOT / "docs" / "entrances.md").read_text()
_TIMEOUT_S = 480


def told(heading: str) -> str:
    """The code under a heading of the page, with a job of two steps."""
    section = _PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    return re.sub(r"(max_steps=|--max-steps |\"max_steps\": )30", r"\g<1>2", code)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the ways need of the checkout: the first rows of the sample."""
    rows = (ROOT / "sample_data" / "captain.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "sample_data").mkdir()
    (tmp_path / "sample_data" / "captain.jsonl").write_text("".join(rows))
    return tmp_path


def walk(stack: Stack, folder: Path, script: str) -> str:
    """Run a shell's script in a folder as someone who has the virtual environment on the path; what it printed."""
    own = environment(stack.settings)
    path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env={**own, "PATH": path}, capture_output=True,
        text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def leave(stack: Stack, name: str) -> None:
    """What a way left behind goes, for those who come after."""
    stack.client.delete_adapter(name)
    with contextlib.suppress(Exception):
        stack.client.delete_dataset(name)


def test_the_shell(stack: Stack, folder: Path) -> None:
    said = walk(stack, folder, told("Shell"))
    assert "Adapter captain-shell@1 is ready" in said
    assert re.search(r"job-[0-9a-f]+ .*succeeded", said)
    leave(stack, "captain-shell")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl; run scripts/system-packages.sh")
def test_http(stack: Stack, folder: Path) -> None:
    said = walk(stack, folder, told("HTTP"))
    assert '"state":"succeeded"' in said
    assert '"role":"assistant"' in said
    leave(stack, "captain-http")


def test_openais_client(stack: Stack, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    said = _exec(told("OpenAI's client"), stack, monkeypatch, folder)
    assert said.strip()
    assert stack.client.adapter("captain-openai").deployment == "deployed"
    leave(stack, "captain-openai")


def test_the_notebooks_short_form(stack: Stack, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    said = _exec(told("Notebook"), stack, monkeypatch, folder)
    assert said.strip()
    leave(stack, "captain-notebook")


def _exec(code: str, stack: Stack, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Run Python in this process, in a folder and with the settings of the stack; what it printed."""
    for name, value in environment(stack.settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(code, "docs/entrances.md", "exec"), {"__name__": "entrance"})
    return said.getvalue()
