"""`harli up` with its real parts: they answer, they come back when killed, and a second one is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from core.config import Settings
from tests.stack import Stack, environment, free_ports, until

pytestmark = pytest.mark.engine


def up(settings: Settings) -> subprocess.CompletedProcess[str]:
    """A `harli up` that is expected to refuse."""
    return subprocess.run(
        [sys.executable, "-m", "core.cli", "up"],
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_parts_answer_and_the_api_knows_them(stack: Stack) -> None:
    parts = {part.name: part for part in stack.client.parts()}
    assert {name: part.state for name, part in parts.items()} == dict.fromkeys(("api", "engine", "console"), "ready")
    assert httpx.get(f"{stack.console_url}/_stcore/health").text == "ok"
    assert parts["console"].url == stack.console_url
    models = httpx.get(f"{stack.engine_url}/v1/models").json()["data"]
    assert "SmolLM2-135M-Instruct" in [model["id"] for model in models]


def test_the_addresses_that_it_prints_answer(stack: Stack) -> None:
    said = (stack.settings.data_dir / "output.txt").read_text().split("Harli is ready")[1]
    shown = dict(re.findall(r"^  (\w+) +(\S+)", said, re.MULTILINE))
    token = Path(shown["Token"]).read_text().strip()
    asked = {"Console": shown["Console"], "API": shown["API"], "OpenAI": f"{shown['OpenAI']}/models"}
    answers = {name: httpx.get(url, headers={"Authorization": f"Bearer {token}"}) for name, url in asked.items()}
    assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(asked, 200)


def test_an_answer_streams(stack: Stack) -> None:
    pieces = list(stack.client.chat("What is the capital of France?", temperature=0.0))
    assert len(pieces) > 3
    assert "Paris" in "".join(pieces)


def test_a_second_one_on_the_same_data_is_refused(stack: Stack) -> None:
    refused = up(stack.settings)
    assert refused.returncode == 1
    assert f"process {stack.process.pid}" in refused.stderr
    assert "[already_up]" in refused.stderr


def test_a_second_one_on_the_same_port_is_refused(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    engine, console = free_ports(2)
    elsewhere = stack.settings.model_copy(
        update={"data_dir": tmp_path_factory.mktemp("second"), "engine_port": engine, "console_port": console}
    )
    refused = up(elsewhere)
    assert refused.returncode == 1
    assert f"port {stack.settings.api_port}" in refused.stderr
    assert "HARLI_API_PORT" in refused.stderr
    assert "[port_taken]" in refused.stderr


def test_a_killed_engine_comes_back_and_the_others_stay(stack: Stack) -> None:
    before, engine = {part.name: part for part in stack.client.parts()}, stack.client.engine()
    stack.restart_engine()
    until(lambda: (now := stack.client.engine()).state == "ready" and now.id != engine.id, 60, "the engine's hello")
    after = {part.name: part for part in stack.client.parts()}
    assert after["engine"].pid != before["engine"].pid
    assert after["engine"].restarts == before["engine"].restarts + 1
    assert after["api"].pid == before["api"].pid
    assert after["console"].pid == before["console"].pid
    assert "Paris" in "".join(stack.client.chat("What is the capital of France?", temperature=0.0))
