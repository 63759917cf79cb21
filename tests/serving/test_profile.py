"""Facts about the profile that an engine on a GPU takes of it, and about how the launcher has it taken."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from core.link.messages import EngineNotice
from core.policy.types import WHOLE
from core.predictor.profile import read_profile
from core.predictor.two_stage import TwoStagePredictor
from core.runtime.profiles import PROFILES
from core.serving import activation, launch
from tests.runtime.test_runtime import HELLO
from tests.serving.conftest import Engine


def test_the_requests_of_a_measured_batch_are_told_from_all_others() -> None:
    own = [activation.profile_rid(7, request) for request in range(3)]
    assert activation.profile_batch(own) == 7
    assert activation.profile_batch([*own, "somebody"]) is None
    assert activation.profile_batch([*own, activation.profile_rid(8, 0)]) is None
    assert activation.profile_batch([f"{activation.CALIBRATION_PREFIX}1", activation.CALIBRATION_END]) is None
    assert activation.profile_batch([]) is None


def test_the_launcher_learns_which_batches_to_send_and_takes_the_word_once(tmp_path: Path) -> None:
    active = activation.Active(HELLO, ((8, 512), (1, 4096)), 99)
    activation.report(tmp_path, active)
    assert activation.take(tmp_path, HELLO.engine_id) == active
    assert activation.take(tmp_path, HELLO.engine_id) is None


class Answers:
    """Where SGLang would be: takes note of what was asked, each request taking `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.now, self._seconds = 0.0, seconds
        monkeypatch.setattr(launch.time, "monotonic", lambda: self.now)
        self.http = httpx.Client(transport=httpx.MockTransport(self._answer), base_url="http://engine")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        self.bodies.append(json.loads(request.content or "{}"))
        self.now += self._seconds
        return httpx.Response(200, json={})


def test_each_batch_is_one_request_of_distinct_prompts_and_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, said = Answers(monkeypatch, 1.0), list[str]()
    launch.profile(engine.http, activation.Active(HELLO, ((8, 512), (1, 4096)), 99), said.append)
    first, second = engine.bodies
    assert len({tuple(ids) for ids in first["input_ids"]}) == 8
    assert {len(ids) for ids in first["input_ids"]} == {512}
    assert activation.profile_batch(second["rid"]) == 1
    assert second["sampling_params"]["max_new_tokens"] == 99
    assert second["input_ids"][0][:512] == first["input_ids"][0]  # the prefix cache saves its prefill
    assert said[0] == "0.00\tmeasures this GPU, once: 8 requests of 512 tokens"
    assert said[1].startswith("0.50\t")


def test_what_cannot_be_measured_within_a_minute_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, said = Answers(monkeypatch, 20.0), list[str]()
    launch.profile(engine.http, activation.Active(HELLO, ((8, 512),) * 6, 99), said.append)
    assert len(engine.bodies) == 3
    assert "3 of 6" in said[-1]


def test_what_was_made_at_the_start_is_left_alone_by_the_collector_before_the_engine_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Answers(monkeypatch, 1.0)
    gc.disable()
    launch.measure(engine.http, activation.Active(HELLO, ((1, 64),), 9), lambda text: None)
    assert gc.isenabled()
    assert engine.paths == ["/generate", "/generate", "/freeze_gc", "/generate"]
    assert engine.bodies[-1]["rid"] == [activation.CALIBRATION_END]


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_first_start_on_a_gpu_takes_a_profile_within_a_minute_and_later_ones_read_it(
    tmp_path: Path, bundled_model: Path
) -> None:
    engine = Engine(tmp_path, bundled_model)
    engine.start()
    log = engine.log.read_text(errors="replace")
    assert "measures this GPU, once" in log
    (path,) = (tmp_path / PROFILES).iterdir()
    predictor = TwoStagePredictor(read_profile(path))
    assert len(predictor.layouts) > 1
    assert 0.0 < predictor.decode_ms(WHOLE, 4, 4 * 512, 512) < 1000.0
    engine.stop()
    began = time.monotonic()
    engine.log.write_text("")
    engine.start()
    assert time.monotonic() - began < 240.0
    assert "measures this GPU" not in engine.log.read_text(errors="replace")
    assert not any(isinstance(m, EngineNotice) and m.code == "no_profile" for m in engine.received)
    engine.stop()
    engine.control.close()
