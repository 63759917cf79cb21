"""How the engine's processes begin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from core.config import EngineSettings
from core.serving import launch, processes
from tests.machine import ROOT
from tests.serving.conftest import Engine


@pytest.mark.engine
def test_on_a_cpu_scheduler_and_detokenizer_are_forked(engine: Engine) -> None:
    children = psutil.Process(engine.process.pid).children()
    # What is spawned has a third beside it, which keeps track of what the others share.
    assert {child.name() for child in children} == {"sglang::scheduler", "sglang::detokenizer"}


@pytest.mark.engine
def test_an_engine_leaves_nothing_in_shared_memory_however_it_ends(engine: Engine) -> None:
    shared = {
        Path(file.path)
        for process in (psutil.Process(engine.process.pid), *psutil.Process(engine.process.pid).children())
        for file in process.open_files()
    }
    named = {path for path in Path("/dev/shm").glob("sglang_loads_*") if path in shared}
    assert not named
    loads = engine.http.get("/v1/loads").json()["loads"]
    assert len(loads) == 1, "its HTTP process still reads what its scheduler writes"


def test_a_tokenizer_is_loaded_once() -> None:
    loaded: list[str] = []

    def load(path: str, *, revision: str | None) -> object:
        loaded.append(path)
        return object()

    first = processes.tokenizer_once(load, "a", revision=None)
    assert processes.tokenizer_once(load, "a", revision=None) is first
    assert processes.tokenizer_once(load, "b", revision=None) is not first
    assert loaded == ["a", "b"]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing of threads, and is afterwards as it was."""
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.usefixtures("bare")
def test_threads_on_a_cpu_do_not_spin_while_they_wait() -> None:
    assert launch.device_and_threads(EngineSettings(device="cpu", threads=3)) == "cpu"
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("PASSIVE", "3")


def test_on_a_gpu_they_wait_as_they_would(bare: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(device: str) -> str:
        asked.append(os.environ["OMP_WAIT_POLICY"])  # while torch is imported, and the device not known
        return "cuda"

    bare.setattr(launch, "resolve_device", resolve)
    assert launch.device_and_threads(EngineSettings()) == "cuda"
    assert asked == ["PASSIVE"] and "OMP_WAIT_POLICY" not in os.environ
    bare.setenv("OMP_WAIT_POLICY", "ACTIVE")
    launch.device_and_threads(EngineSettings())
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


_FORKS = """
import gc, multiprocessing
from types import SimpleNamespace
from core.serving import processes

def start(*_):
    multiprocessing.Process(target=lambda: print(gc.get_freeze_count())).start()

print(len(gc.get_objects()), flush=True)
processes.fork(start, object, SimpleNamespace(skip_tokenizer_init=True))
"""


def test_a_childs_collector_leaves_alone_what_it_shares_with_its_parent() -> None:
    answer = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not answer.stderr, answer.stderr
    made, left_alone = map(int, answer.stdout.split())
    assert left_alone > made * 0.9
