"""`harli doctor` tells what is there, what is missing and how to get it, and fails only for what is needed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.config import EngineSettings, Settings
from core.doctor import Finding, examine, is_well
from core.serving.versions import SGLANG
from core.supervise import hold
from tests.stack import free_ports


def doctored(tmp_path: Path, **changes: Any) -> dict[str, Finding]:
    """Findings by topic, on free ports and an empty data directory unless `changes` say otherwise."""
    api, engine, console = free_ports(3)
    defaults: dict[str, Any] = {
        "data_dir": tmp_path / "data",
        "api_port": api,
        "engine_port": engine,
        "console_port": console,
    }
    return {finding.topic: finding for finding in examine(Settings(**(defaults | changes)))}


def test_a_disk_with_little_room_is_worth_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctored(tmp_path)["data directory"].level == "ok"
    monkeypatch.setattr("core.doctor._LEAST_FREE_GIB", 1e9)
    found = doctored(tmp_path)["data directory"]
    assert found.level == "note" and "free some of its disk" in found.remedy


def test_a_machine_that_runs_these_tests_can_run_harli(tmp_path: Path) -> None:
    findings = doctored(tmp_path)
    assert is_well(list(findings.values())), [f for f in findings.values() if f.level == "missing"]
    assert findings["python"].value.startswith(".".join(map(str, sys.version_info[:3])))
    assert f"{len(os.sched_getaffinity(0))} cores" in findings["cpu"].value
    assert f"{psutil.virtual_memory().total / 2**30:.1f} GiB," in findings["memory"].value
    assert findings["sglang"].value.startswith(SGLANG)
    assert "SmolLM2" in findings["model"].value
    assert not (tmp_path / "data").exists(), "looking makes nothing"


def test_a_taken_port_is_missing_with_its_holder_and_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = doctored(tmp_path, engine_port=port)["engine port"]
    assert finding.level == "missing"
    assert str(port) in finding.value
    assert f"process {os.getpid()}" in finding.value
    assert "HARLI_ENGINE_PORT" in finding.remedy


def test_a_running_harli_holds_its_own_ports(tmp_path: Path) -> None:
    with hold(tmp_path / "data"), socket.create_server(("127.0.0.1", 0)) as server:
        findings = doctored(tmp_path, api_port=server.getsockname()[1])
    assert findings["ports"].level == "ok"
    assert "api port" not in findings


def test_a_wrong_model_folder_is_missing(tmp_path: Path) -> None:
    finding = doctored(tmp_path, engine=EngineSettings(model=tmp_path / "nowhere"))["model"]
    assert finding.level == "missing"
    assert str(tmp_path / "nowhere") in finding.value


def test_a_gpu_that_is_asked_for_and_not_there_is_missing(tmp_path: Path) -> None:
    import torch

    finding = doctored(tmp_path, engine=EngineSettings(device="cuda"))["engine"]
    assert finding.level == ("ok" if torch.cuda.is_available() else "missing")


def test_a_data_directory_below_a_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    finding = doctored(tmp_path, data_dir=tmp_path / "data" / "below")["data directory"]
    assert finding.level == "missing"
    assert "HARLI_DATA_DIR" in finding.remedy


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("postgresql+psycopg://harli:secret@127.0.0.1:{port}/harli", "127.0.0.1:{port}"),
        ("not a url", "no SQLAlchemy URL"),
        ("oracle+nothing://host/db", "oracle"),
    ],
)
def test_a_database_that_cannot_be_reached_is_missing_and_its_password_is_not_shown(
    tmp_path: Path, url: str, word: str
) -> None:
    port = free_ports(1)[0]
    finding = doctored(tmp_path, database_url=url.format(port=port))["database"]
    assert finding.level == "missing"
    assert word.format(port=port) in finding.value
    assert "secret" not in finding.value
    assert "HARLI_DATABASE_URL" in finding.remedy


def run(tmp_path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    ports = zip(("HARLI_API_PORT", "HARLI_ENGINE_PORT", "HARLI_CONSOLE_PORT"), map(str, free_ports(3)), strict=True)
    return subprocess.run(
        [sys.executable, "-m", "core.cli", "doctor", *options],
        env={**os.environ, "HARLI_DATA_DIR": str(tmp_path), **dict(ports), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_prints_json_and_ends_well(tmp_path: Path) -> None:
    done = run(tmp_path, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["ok"] is True
    assert {"topic", "level", "value", "remedy"} == set(answer["findings"][0])


def test_the_command_fails_when_something_needed_is_missing(tmp_path: Path) -> None:
    done = run(tmp_path, HARLI_ENGINE__MODEL=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "cannot run yet: 1 missing" in done.stdout
