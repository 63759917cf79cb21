"""Two API processes on one store: one dispatches, the other takes over when it dies or stands still."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.api import schemas
from core.client import Client
from core.control.owner import LEASE
from core.errors import HarliError
from core.link.messages import SetTargets, StartJob
from db.leases import LeaseRecord
from db.store import Store
from tests.control import files
from tests.control.peer import EnginePeer
from tests.stack import free_ports, until

# What has nothing to do with the database is tried with one of them: each of these starts two processes.
either = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)


@dataclass
class Api:
    """A process of ``python -m core.api``."""

    process: subprocess.Popen[bytes]
    client: Client

    @property
    def dispatches(self) -> bool:
        return self.client.health().dispatcher


@pytest.fixture
def link_url() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="hl"))
    yield f"ipc://{folder}/link.sock"
    shutil.rmtree(folder)


@pytest.fixture
def start(store_url: str, link_url: str, data_dir: Path) -> Iterator[Callable[[], Api]]:
    """Starts API processes that share store, link address and data directory."""
    with ExitStack() as stack:

        def run() -> Api:
            (port,) = free_ports(1)
            environment = {name: value for name, value in os.environ.items() if not name.startswith("HARLI_")}
            environment |= {
                "HARLI_DATA_DIR": str(data_dir),
                "HARLI_DATABASE_URL": store_url,
                "HARLI_LINK_URL": link_url,
                "HARLI_API_PORT": str(port),
            }
            log = stack.enter_context((data_dir / f"api-{port}.log").open("wb"))
            process = subprocess.Popen([sys.executable, "-m", "core.api"], env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
            client = stack.enter_context(Client(f"http://127.0.0.1:{port}", token=data_dir / "admin-token"))
            until(lambda: _answers(client, process), 120, "the API")
            return Api(process, client)

        yield run


def _answers(client: Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        client.health()
    except HarliError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@pytest.fixture
def pair(start: Callable[[], Api]) -> tuple[Api, Api]:
    """The one that dispatches, and the one that does not."""
    first = start()
    until(lambda: first.dispatches, what="the first to dispatch")
    return first, start()


def submitted(api: Api, tmp_path: Path) -> schemas.Job:
    dataset = api.client.upload_dataset(files.jsonl(tmp_path / "rivers.jsonl"))
    return api.client.submit_job(dataset=dataset.name, adapter_name="sailor")


def test_only_one_dispatches_and_either_takes_orders(pair: tuple[Api, Api], link_url: str, tmp_path: Path) -> None:
    first, second = pair
    assert (first.dispatches, second.dispatches) == (True, False)
    engine = EnginePeer(link_url)
    try:
        engine.hello()
        engine.expect(SetTargets)
        assert second.client.engine().id == "engine-1"
        job = submitted(second, tmp_path)
        order = engine.expect(StartJob)
        assert order.spec.job_id == job.id
        engine.nothing(StartJob, 1.5)
        engine.update(job.id, order.token, "started", total_steps=9)
        until(lambda: second.client.job(job.id).state == "running")
        for ago in (2.0, 1.0):
            engine.telemetry(time=time.time() - ago, itl=[(12.0, 4)], decode_tokens=4)
        second.client.set_targets([{"kind": "itl", "ms": 25}])
        assert engine.expect(SetTargets).targets[0].ms == 25
        figures = until(lambda: second.client.live(60).window, what="figures from the store")
        assert figures.itl_p50_ms == 12.0
        assert not second.dispatches
    finally:
        engine.close()


def test_the_second_takes_over_from_a_killed_first_with_job_and_engine(
    pair: tuple[Api, Api], link_url: str, tmp_path: Path
) -> None:
    first, second = pair
    engine = EnginePeer(link_url)
    try:
        engine.hello()
        job = submitted(second, tmp_path)
        order = engine.expect(StartJob)
        engine.update(job.id, order.token, "started", total_steps=9)
        until(lambda: second.client.job(job.id).state == "running")
        engine.reconnected()
        os.kill(first.process.pid, signal.SIGKILL)
        until(lambda: second.dispatches, 60, "the second to take over")
        until(engine.reconnected, 60, "the engine to reconnect")
        engine.hello(running_job=job.id, running_token=order.token)
        engine.update(job.id, order.token, "metric", step=5, loss=2.0)
        until(lambda: second.client.job(job.id).step == 5)
        assert [event.kind for event in second.client.job_events(job.id)] == ["submitted", "starting", "running"]
        engine.nothing(StartJob)
    finally:
        engine.close()


def holder(store_url: str) -> str | None:
    """Who has the lease."""
    with closing(Store(store_url)) as store, store.read() as session:
        return session.get_one(LeaseRecord, LEASE).holder


@either
def test_an_orderly_end_hands_over_at_once(pair: tuple[Api, Api], store_url: str) -> None:
    first, second = pair
    before = holder(store_url)
    first.process.terminate()
    assert first.process.wait(60) == 0
    assert holder(store_url) != before, "nobody has to wait until the lease runs out"
    until(lambda: second.dispatches, what="the second to take over")


@either
def test_a_first_that_stands_still_loses_the_engine_and_dispatches_no_more_when_it_wakes(
    pair: tuple[Api, Api], link_url: str
) -> None:
    first, second = pair
    engine = EnginePeer(link_url)
    try:
        engine.hello()
        engine.expect(SetTargets)
        engine.reconnected()
        first.process.send_signal(signal.SIGSTOP)
        until(lambda: second.dispatches, 60, "the second to take over")
        until(engine.reconnected, 60, "the engine to give the first up")
        engine.hello()
        engine.expect(SetTargets)
        first.process.send_signal(signal.SIGCONT)
        until(lambda: not first.dispatches, 60, "the first to notice")
        assert first.client.engine().state == "ready"
        assert (first.dispatches, second.dispatches) == (False, True)
    finally:
        engine.close()
