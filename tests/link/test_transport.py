"""The engine link over real sockets: every message arrives as it was sent, peers may come and go."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from core.errors import HarliError
from core.link import messages
from core.link.transport import ControlEnd, EngineEnd
from tests.stack import free_ports, until


@pytest.fixture(params=["ipc", "tcp"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="hl"))
    yield f"ipc://{folder}/run/link.sock" if request.param == "ipc" else f"tcp://127.0.0.1:{free_ports(1)[0]}"
    shutil.rmtree(folder)


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens ends that are closed after the test."""
    ends: list[Any] = []

    def make(kind: type, *arguments: str) -> Any:
        ends.append(kind(*arguments))
        return ends[-1]

    yield make
    for end in ends:
        end.close()


HELLO = messages.Hello(
    engine_id="e",
    pid=7,
    http_url="http://127.0.0.1:1",
    model="small",
    model_path="/m",
    device="cpu",
    device_name="a CPU",
    dtype="float32",
    parameters=1,
    versions={"sglang": "0.5.16"},
    max_lora_rank=8,
    lora_modules=("q_proj",),
    kv_tokens=1,
    max_running_requests=1,
    partitions=("whole",),
    solo_itl_ms=1.5,
)
SPEC = messages.JobSpec(job_id="j", dataset_path="/d", adapter_name="a", output_dir="/o")
FROM_ENGINE: list[messages.FromEngine] = [
    HELLO,
    messages.Telemetry(
        engine_id="e", time=1.5, interval_s=0.5, itl=[(1.25, 3)], ttft_ms=[9.0], plan=messages.PlanView(policy="p")
    ),
    messages.JobUpdate(engine_id="e", job_id="j", token=3, time=2.0, kind="metric", step=4, loss=0.5),
    messages.EngineNotice(engine_id="e", time=1.0, level="warning", code="c", message="ümläut"),
    messages.Learnt(
        engine_id="e",
        time=1.0,
        steps=[(1, 9.0, 9.5)],
        tasklets={"forward": (2.0, 2.5)},
        mix={"forward": 2.0},
        step_tokens=64.0,
    ),
    messages.Stopping(engine_id="e"),
    messages.Goodbye(engine_id="e"),
]
TO_ENGINE: list[messages.ToEngine] = [
    messages.SetTargets(version=2, targets=(messages.Target(kind="itl", ms=40.0),)),
    messages.StartJob(spec=SPEC, token=9, resume_from="/c"),
    messages.PauseJob(job_id="j", token=9),
    messages.StopJob(job_id="j", token=9, save=True),
]


def test_the_examples_are_all_the_kinds_there_are() -> None:
    assert {type(message) for message in FROM_ENGINE} == set(get_args(messages.FromEngine))
    assert {type(message) for message in TO_ENGINE} == set(get_args(messages.ToEngine))


def test_every_message_arrives_as_it_was_sent_in_order(url: str, opened: Callable[..., Any]) -> None:
    control, engine = opened(ControlEnd, url), opened(EngineEnd, url, "e")
    for message in FROM_ENGINE:
        assert engine.send(message)
    assert [control.receive(30_000) for _ in FROM_ENGINE] == [("e", message) for message in FROM_ENGINE]
    for order in TO_ENGINE:
        assert control.send("e", order)
    assert [engine.receive(30_000) for _ in TO_ENGINE] == TO_ENGINE
    assert engine.receive(0) is None
    assert control.receive(0) is None


def test_what_is_sent_before_the_control_plane_is_there_waits_for_it(url: str, opened: Callable[..., Any]) -> None:
    engine = opened(EngineEnd, url, "e")
    assert engine.send(HELLO)
    assert opened(ControlEnd, url).receive(30_000) == ("e", HELLO)


def test_an_engine_that_is_not_connected_cannot_be_sent_to(url: str, opened: Callable[..., Any]) -> None:
    assert not opened(ControlEnd, url).send("nobody", TO_ENGINE[0])


def test_the_engine_notices_a_control_plane_that_was_replaced(
    url: str, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.link.transport._PORT_WAIT_S", 30.0)  # until ZeroMQ's thread has had its turn
    first, engine = ControlEnd(url), opened(EngineEnd, url, "e")
    until(engine.reconnected)
    assert not engine.reconnected()
    first.close()
    second = opened(ControlEnd, url)
    until(engine.reconnected)
    engine.send(HELLO)
    assert second.receive(30_000) == ("e", HELLO)


def test_a_restarted_engine_may_come_back_under_its_old_name(url: str, opened: Callable[..., Any]) -> None:
    control = opened(ControlEnd, url)
    before = opened(EngineEnd, url, "e")
    before.send(HELLO)
    control.receive(30_000)
    after = opened(EngineEnd, url, "e")
    after.send(HELLO)
    assert control.receive(30_000) == ("e", HELLO)
    assert control.send("e", TO_ENGINE[0])
    assert after.receive(30_000) == TO_ENGINE[0]


def test_an_unknown_message_is_an_error_of_its_own_and_the_next_one_is_read(
    url: str, opened: Callable[..., Any]
) -> None:
    control, engine = opened(ControlEnd, url), opened(EngineEnd, url, "e")
    engine._socket.send(msgspec.msgpack.encode({"type": "Song"}))
    engine.send(HELLO)
    with pytest.raises(msgspec.DecodeError):
        control.receive(30_000)
    assert control.receive(30_000) == ("e", HELLO)


def test_a_sender_whose_peer_stays_away_is_told_when_the_queue_is_full(
    url: str, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.link.transport._HIGH_WATER", 5)
    engine = opened(EngineEnd, url, "e")
    assert [engine.send(HELLO) for _ in range(7)] == [True] * 5 + [False] * 2


def test_only_this_user_may_connect_to_the_socket(opened: Callable[..., Any]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="hl"))
    try:
        opened(ControlEnd, f"ipc://{folder}/link.sock")
        assert stat.S_IMODE(os.stat(folder / "link.sock").st_mode) == 0o600
    finally:
        shutil.rmtree(folder)


def test_an_address_that_is_taken_is_named_with_the_setting(opened: Callable[..., Any]) -> None:
    url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    opened(ControlEnd, url)
    with pytest.raises(HarliError, match=f"{url}.*HARLI_LINK_URL"):
        ControlEnd(url)
