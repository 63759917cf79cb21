"""The command `harli` with a whole Harli behind it, from a file to an adapter that answers."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from tests.machine import ROOT
from tests.stack import Stack
from tests.test_cli import answer, invoker

CAPTAIN = ROOT / "sample_data" / "captain.jsonl"


@pytest.mark.engine
def test_the_journey_from_a_file_to_an_answer(stack: Stack, tmp_path: Path) -> None:
    harli = invoker(stack.settings.api_port, stack.settings.data_dir)
    adapter = f"cli-{uuid4().hex[:6]}"
    watched = harli("submit", "--dataset", str(CAPTAIN), "--adapter", adapter, "--max-steps", "3", "--watch")
    assert watched.exit_code == 0, watched.output
    assert f"{adapter}@1" in watched.stdout
    versions = answer(harli("adapters", "list", "--json"))
    assert adapter in [each["name"] for each in versions]
    saved = harli("adapters", "download", adapter, "--to", str(tmp_path / "adapter.zip"))
    assert saved.exit_code == 0
    assert (tmp_path / "adapter.zip").read_bytes()[:2] == b"PK"
    sent = answer(harli("adapters", "upload", str(tmp_path / "adapter.zip"), "--name", f"{adapter}-copy", "--json"))
    assert sent["versions"][0]["origin"] == "imported"
    question = "What is the capital of France?"
    assert "Paris" in harli("chat", question).stdout
    reply = answer(harli("chat", question, "--json", "--max-tokens", "8"))
    assert reply["completion_tokens"] <= 8
    talk = harli("chat", "--max-tokens", "20", stdin=f"{question}\n\nAnd of Spain?\n")
    assert "Paris" in talk.stdout
    assert "Madrid" in talk.stdout
    for name in (adapter, f"{adapter}-copy"):
        assert harli("adapters", "delete", name).exit_code == 0
    assert "ready" in harli("logs", "engine", "-n", "200").stdout
