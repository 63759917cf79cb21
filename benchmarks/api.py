"""How fast the API answers while it is in use: listings and telemetry at 500 requests a second, then 20 consoles.

    python -m benchmarks.api [--seconds 20] [--rate 500] [--stores sqlite postgres]

An API process of its own on a store with 10,000 jobs and an hour of telemetry; an engine's peer reports figures twice
a second and runs a job that reports ten steps a second. Requests are sent when they are due, whether those before them
have been answered or not, and a latency counts from that moment. Eight in ten ask for what a dashboard shows (newest
jobs, the last five minutes), two for a page from somewhere in the list. What is left of the machine's cores the load
generator and the database take. Writes results/api.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import psycopg
import uvloop
from sqlalchemy import insert, text

from benchmarks import record
from core.api import schemas
from core.client import Client
from core.config import Settings
from core.control import pages
from core.control import telemetry as history
from core.errors import HarliError
from core.link.messages import PlanView, Telemetry
from core.telemetry import interval
from db.base import now
from db.jobs import JobRecord
from db.store import Store
from tests import postgres
from tests.app.peer import Peer
from tests.stack import environment, free_ports, until

JOBS = 10_000
WAITING = 200
TELEMETRY_S = 3600
TABS = 20
TOKENS = 10
CONNECTIONS = 64
LIMITS_MS = {"listing and telemetry": 100.0, "consoles": 250.0}


# ---- what is there ---------------------------------------------------------------------------------------------------


def fill(store: Store) -> None:
    """Jobs, no two of them asked for alike, the newest of them waiting, and an hour of telemetry. PostgreSQL is given
    the statistics that it takes by itself within a minute."""
    time_ = now()
    spec = schemas.JobCreate(dataset="rows", adapter_name="bot", micro_batch_tokens=256, sequence_length=256, epochs=3)
    plain = spec.model_dump(mode="json")
    jobs = []
    for number in range(JOBS):
        waits = number >= JOBS - WAITING
        at = time_ - timedelta(minutes=JOBS - number)
        jobs.append(
            {
                "id": f"job-{number:012x}",
                "tenant": "default",
                "name": f"Nightly run {number}",
                "state": "paused" if waits else "succeeded",
                "spec": {**plain, "adapter_name": f"bot-{number}", "seed": number},
                "dataset_id": "ds-000000000000",
                "dataset_name": "rows",
                "adapter_name": f"bot-{number}",
                "adapter_version": None if waits else 1,
                "created_at": at,
                "started_at": None if waits else at,
                "ended_at": None if waits else at + timedelta(minutes=5),
                "state_since": at,
                "step": 0 if waits else 300,
                "total_steps": None if waits else 300,
                "loss": None if waits else 1.25,
                "tokens": 0 if waits else 76_800,
            }
        )
    with store.write() as session:
        session.execute(insert(JobRecord), jobs)
        start = int(time_.timestamp()) - TELEMETRY_S
        for second in range(start, start + TELEMETRY_S):
            message = Telemetry(
                engine_id="engine-0",
                time=float(second + 1),
                interval_s=1.0,
                itl=[(20.0 + gap, 4) for gap in range(30)],
                ttft_ms=[180.0, 210.0],
                decode_steps=30,
                decode_tokens=120,
                finetune_tokens=900,
                running=4,
                plan=PlanView(policy="hybrid"),
            )
            history.put_second(session, second, interval.of_message(message, {None: 60.0}))
        if store.dialect == "postgresql":
            session.execute(text("ANALYZE"))


def report(url: str, http_url: str) -> None:
    """The engine's peer, until the process is ended."""
    with Peer(url, Path("/nonexistent/small"), http_url):
        time.sleep(1e6)


@contextlib.contextmanager
def serving(database_url: str | None) -> Iterator[tuple[Settings, list[str], psutil.Process]]:
    """An API process on a filled store, with a job that reports: its settings, tokens to ask it with, the process."""
    with tempfile.TemporaryDirectory(prefix="hb") as folder:
        api, engine, console = free_ports(3)
        settings = Settings(
            data_dir=Path(folder), database_url=database_url, api_port=api, engine_port=engine, console_port=console
        )
        store = Store(settings.resolved_database_url)
        fill(store)
        store.close()
        peer = multiprocessing.get_context("spawn").Process(
            target=report, args=(settings.resolved_link_url, settings.engine_url), daemon=True
        )
        with _process(settings) as process, Client(settings.api_url, token=settings.token_file) as client:
            until(lambda: _answers(client), 60, "the API")
            users = [client.create_user(f"tab-{number}", "operator").id for number in range(TOKENS)]
            tokens = [client.create_token("benchmark", user).token for user in users]
            rows = Path(folder) / "rows.jsonl"
            rows.write_text('{"prompt": "Where to?", "completion": "To sea."}\n' * 40)
            client.upload_dataset(rows, "rows")
            peer.start()
            try:
                until(lambda: client.live().now is not None, 30, "the first figures")
                job = client.submit_job(dataset="rows", adapter_name="busy", max_steps=1_000_000)
                until(lambda: client.job(job.id).step > 3, 30, "the job's first steps")
                yield settings, tokens, process
            finally:
                peer.terminate()
                peer.join(10)


@contextlib.contextmanager
def _process(settings: Settings) -> Iterator[psutil.Process]:
    variables = environment(settings)
    if settings.database_url is not None:
        variables["HARLI_DATABASE_URL"] = settings.database_url
    log = settings.data_dir / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "core.api"], env=variables, cwd=settings.data_dir, stdout=output, stderr=output
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _answers(client: Client) -> bool:
    try:
        return client.health().dispatcher
    except HarliError:
        return False


# ---- asking ----------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """Latencies by what was asked for, ms, and how often each status came."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    def figures(self, limit_ms: float) -> dict[str, Any]:
        every = np.array([value for values in self.ms.values() for value in values])
        return {
            "requests": len(every),
            "requests_per_s": round(len(every) / self.seconds, 1),
            "not_200": {str(status): count for status, count in self.statuses.items() if status != 200},
            **_percentiles(every),
            "limit_p99_ms": limit_ms,
            "kept": bool(np.percentile(every, 99) < limit_ms) and set(self.statuses) == {200},
            "of": {
                name: {"requests": len(values), **_percentiles(np.array(values))} for name, values in self.ms.items()
            },
        }


def _percentiles(values: np.ndarray[Any, Any]) -> dict[str, float]:
    return {f"p{q}_ms": round(float(np.percentile(values, q)), 2) for q in (50, 95, 99, 100)}


class Connections:
    """Keep-alive connections to one address, each used by one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None] = asyncio.Queue()
        for _ in range(CONNECTIONS):
            self._free.put_nowait(None)

    async def get(self, path: str, token: str) -> int:
        """The status of a GET whose body has been read to its end."""
        pair = await self._free.get()
        try:
            pair = pair or await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
            reader, writer = pair
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
            await reader.readexactly(int(fields[b"content-length"]))
            return int(head.split(b" ", 2)[1])
        except BaseException:
            pair = None
            raise
        finally:
            self._free.put_nowait(pair)


async def ask(
    port: int, tokens: Sequence[str], due: Sequence[tuple[float, str, Callable[[random.Random], str]]], seed: int
) -> Asked:
    """Send each request (seconds from now, its kind, what makes its path) when it is due."""
    connections, chance, asked = Connections(port), random.Random(seed), Asked()
    began = time.perf_counter()

    async def one(at: float, kind: str, path: str, token: str) -> None:
        status = await connections.get(path, token)
        asked.ms.setdefault(kind, []).append((time.perf_counter() - began - at) * 1e3)
        asked.statuses[status] += 1

    async with asyncio.TaskGroup() as group:
        for number, (at, kind, make) in enumerate(due):
            wait_s = at - (time.perf_counter() - began)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(one(at, kind, make(chance), tokens[number % len(tokens)]))
    asked.seconds = time.perf_counter() - began
    return asked


# ---- what is asked for -----------------------------------------------------------------------------------------------

_NEWEST = ("newest jobs", lambda _: "/api/jobs?limit=50")
_PLACE = (
    "jobs from the middle",
    lambda chance: f"/api/jobs?limit=50&cursor={pages.cursor(chance.randrange(60, JOBS - WAITING))}",
)
_FIGURES = ("telemetry", lambda _: "/api/telemetry?seconds=300&points=300")
_LIVE = ("live", lambda _: "/api/live?window_s=60")


def listing_and_telemetry(rate: float, seconds: float, seed: int) -> list[Any]:
    """Poisson arrivals: 40 % newest jobs, 10 % jobs from anywhere, 40 % telemetry, 10 % the live summary."""
    chance = random.Random(seed)
    due, at = [], 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        kind = chance.choices((_NEWEST, _PLACE, _FIGURES, _LIVE), (40, 10, 40, 10))[0]
        due.append((at, *kind))
    return due


def consoles(seconds: float, seed: int) -> list[Any]:
    """Each tab on its own, without the console's sharing: figures and curves every second, jobs and sidebar every
    two."""
    chance = random.Random(seed)
    due = []
    for _ in range(TABS):
        for kind, every_s in ((_LIVE, 1.0), (_FIGURES, 1.0), (_NEWEST, 2.0), (_LIVE, 2.0)):
            at = chance.random() * every_s
            while at < seconds:
                due.append((at, *kind))
                at += every_s
    return sorted(due, key=lambda entry: entry[0])


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(database_url: str | None, rate: float, seconds: float) -> dict[str, Any]:
    with serving(database_url) as (settings, tokens, process):
        plans = {"listing and telemetry": listing_and_telemetry(rate, seconds, 1), "consoles": consoles(seconds, 2)}
        uvloop.run(ask(settings.api_port, tokens, consoles(3.0, 3), 3))
        found = {}
        for name, due in plans.items():
            before = _cpu_s(process)
            asked = uvloop.run(ask(settings.api_port, tokens, due, 4))
            cores = {part: round((used - before[part]) / asked.seconds, 3) for part, used in _cpu_s(process).items()}
            found[name] = {**asked.figures(LIMITS_MS[name]), "cores": cores}
            print(f"  {name}: {found[name]}", flush=True)
        return found


def _cpu_s(api: psutil.Process) -> dict[str, float]:
    """CPU seconds so far, by who used them; the others are the engine's peer and PostgreSQL."""

    def used(process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    this = psutil.Process()
    others = [child for child in this.children(recursive=True) if child.pid != api.pid]
    return {"api": used(api), "load_generator": used(this), "others": sum(map(used, others))}


@contextlib.contextmanager
def database(kind: str) -> Iterator[str | None]:
    """The URL of an empty database; None is SQLite's."""
    if kind == "sqlite":
        yield None
        return
    with postgres.server() as host:
        with psycopg.connect(host=host, user="harli", dbname="postgres", autocommit=True) as admin:
            admin.execute("CREATE DATABASE harli")
        yield f"postgresql://harli@/harli?host={host}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two loads")
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second of listings and telemetry")
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "postgres"), default=["sqlite", "postgres"])
    arguments = parser.parse_args()
    body: dict[str, Any] = {
        **record.provenance("fastapi", "uvicorn", "sqlalchemy", "psycopg"),
        "load_average_before": round(os.getloadavg()[0], 2),
        "jobs": JOBS,
        "stores": {},
    }
    for kind in arguments.stores:
        print(kind, flush=True)
        with database(kind) as url:
            body["stores"][kind] = measure(url, arguments.rate, arguments.seconds)
    print(record.write("api", body))


if __name__ == "__main__":
    main()
