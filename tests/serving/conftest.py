"""A real engine for this room: SGLang with the runtime inside, and the control plane's end of its link."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from core.config import Settings
from core.intake import dataset, tokenizer
from core.link.messages import FromEngine, Hello, JobSpec, JobUpdate, SetTargets, StartJob, Target, ToEngine
from core.link.transport import ControlEnd
from core.torchvision_ops import declare
from tests.machine import ROOT
from tests.stack import free_ports

START_S = 240.0

declare()


class Engine:
    """One engine process after another on the same ports, link and data directory."""

    def __init__(self, data_dir: Path, model: Path, bases: Sequence[Path] = ()) -> None:
        (port,) = free_ports(1)
        self.settings = Settings(data_dir=data_dir, engine_port=port, engine={"model": model})  # type: ignore[arg-type]
        self.model, self.bases = model, bases
        self.control = ControlEnd(self.settings.resolved_link_url)
        # SGLang closes a connection that was idle for 5 s, perhaps while the next request is sent.
        self.http = httpx.Client(
            base_url=self.settings.engine_url, timeout=120.0, limits=httpx.Limits(keepalive_expiry=2.0)
        )
        self.log = data_dir / "engine.log"
        self.received: list[FromEngine] = []
        self.pending: list[FromEngine] = []

    def start(self) -> Hello:
        """Start the process and wait for its hello."""
        environment = os.environ | {
            "HARLI_DATA_DIR": str(self.settings.data_dir),
            "HARLI_ENGINE_PORT": str(self.settings.engine_port),
            "HARLI_ENGINE__MODEL": str(self.model),
            "HARLI_ENGINE__MAX_TOTAL_TOKENS": "10240",
            "HARLI_FINETUNE__BASE_MODELS": json.dumps([str(path) for path in self.bases]),
            "HARLI_FINETUNE__WINDOW_LAYERS": "2",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "core.serving"], env=environment, cwd=ROOT, stdout=log, stderr=log
            )
        hello = self.until(lambda m: isinstance(m, Hello), START_S)
        assert isinstance(hello, Hello)
        self.id = hello.engine_id
        assert hello.solo_itl_ms is not None
        self.solo_ms = hello.solo_itl_ms
        return hello

    def send(self, message: ToEngine) -> None:
        assert self.control.send(self.id, message)

    def train_beside_decode(self, version: int) -> None:
        """Set a target that leaves room for a handful of tasklets between two tokens, on a machine that has become busy
        too, and yet not for whole micro-batches, which take seconds."""
        self.send(SetTargets(version=version, targets=(Target(kind="itl", ms=12 * self.solo_ms),)))

    def run(self, spec: JobSpec, token: int, resume_from: str | None = None) -> None:
        self.send(StartJob(spec=spec, token=token, resume_from=resume_from))

    def until(self, done: Callable[[FromEngine], bool], seconds: float = 120.0) -> FromEngine:
        """Wait for such a message."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while self.pending:
                if done(message := self.pending.pop(0)):
                    return message
            got = self.control.receive(200)
            if got is not None:
                self.received.append(got[1])
                self.pending.append(got[1])
            elif self.process.poll() is not None:
                break
        tail = self.log.read_text(errors="replace")[-3000:]
        raise AssertionError(f"it did not come; exit status {self.process.poll()}; the log ends:\n{tail}")

    def update(self, kind: str, job: str, seconds: float = 120.0) -> JobUpdate:
        def matches(message: FromEngine) -> bool:
            if isinstance(message, JobUpdate) and message.job_id == job and message.kind == "failed" != kind:
                raise AssertionError(f"job {job} failed: {message.message}")
            return isinstance(message, JobUpdate) and (message.kind, message.job_id) == (kind, job)

        found = self.until(matches, seconds)
        assert isinstance(found, JobUpdate)
        return found

    def generate(self, prompt: list[int], tokens: int, adapter: str | None = None) -> list[int]:
        """Greedy token ids."""
        return generate(self.http, prompt, tokens, adapter)

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once."""
        for process in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)


def generate(http: httpx.Client, prompt: list[int], tokens: int, adapter: str | None) -> list[int]:
    """Greedy token ids from SGLang's native API."""
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens}}
    if adapter is not None:
        body["lora_path"] = adapter
    answer = http.post("/generate", json=body)
    answer.raise_for_status()
    return list(answer.json()["output_ids"])


@pytest.fixture(scope="session")
def other_base(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Path:
    """The folder of a small random model of another family, with the bundled one's tokenizer."""
    from transformers import AutoTokenizer

    from tests.finetune import small

    path = tmp_path_factory.mktemp("bases") / "other-base"
    tokens = AutoTokenizer.from_pretrained(bundled_model)
    small.model("qwen3", layers=5, vocabulary=len(tokens)).save_pretrained(path)
    tokens.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path, other_base: Path) -> Iterator[Engine]:
    """A started engine that serves the bundled model, and lets jobs name another, and a copy of the bundled one; a
    third that is listed is not there."""
    copy = other_base.with_name("copy")
    copy.symlink_to(bundled_model)
    bases = [other_base, copy, other_base.with_name("gone")]
    made = Engine(tmp_path_factory.mktemp("engine"), bundled_model, bases)
    made.start()
    yield made
    if made.process.poll() is None:
        made.kill()
    made.control.close()


@pytest.fixture(scope="session")
def captain(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Path:
    """The sample data set, normalised."""
    path = tmp_path_factory.mktemp("data") / "captain.parquet"
    source = ROOT / "sample_data/captain.jsonl"
    dataset.ingest(source, path, filename=source.name, tokenizer=tokenizer.load(bundled_model))
    return path
