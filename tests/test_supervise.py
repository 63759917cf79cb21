"""`harli up`'s supervisor, with small programs for parts: it starts, heals and ends a group and leaves no orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from core.config import EngineSettings, Settings
from core.control import dispatcher
from core.errors import Conflict, HarliError, Invalid
from core.supervise import Spec, await_reaper, check_ports, down, hold, specs
from tests.api.serving import plain, served
from tests.control.peer import AdapterServer, EnginePeer
from tests.stack import lives, until

# Builds parts from JSON and runs them as `harli up` does.
GROUP = """
import json, sys
from pathlib import Path
from core.config import EngineSettings, Settings
from core.display import Display
from core.errors import HarliError
from core.supervise import Spec, Supervisor, await_reaper, hold

data_dir = Path(sys.argv[1])
parts = []
for part in json.loads(sys.argv[2]):
    flag = part.pop("flag")
    parts.append(Spec(ready=lambda http, process, flag=flag: Path(flag).exists(), **part))
try:
    await_reaper(data_dir, print)
    with hold(data_dir) as lock:
        Supervisor(data_dir, parts, Display(Settings(data_dir=data_dir)), lock).run()
except HarliError as error:
    sys.exit(f"error: {error.message} [{error.code}]")
"""
# Announces itself, has a child of its own, and notes how it ended.
PART = """
import signal, subprocess, sys, time
from pathlib import Path

folder, name = Path(sys.argv[1]), sys.argv[2]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the kernel asks, and the reaper perhaps too
    with (folder / "ended").open("a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
with (folder / "started").open("a") as file:
    file.write(f"{name} {time.monotonic()} {child.pid}\\n")
(folder / name).touch()
time.sleep(600)
"""
# Says so when it is asked to stop, and stays.
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("deaf", flush=True)
while True:
    time.sleep(600)
"""


@dataclass
class Group:
    """A supervisor under test and what it left in its folder."""

    folder: Path
    process: subprocess.Popen[str]
    seen: set[int] = field(default_factory=set)

    def parts(self) -> dict[str, dict[str, Any]]:
        path = self.folder / "run" / "parts.json"
        return {part["name"]: part for part in json.loads(path.read_text())} if path.exists() else {}

    def states(self) -> dict[str, str]:
        return {name: part["state"] for name, part in self.parts().items()}

    def restarts(self, name: str) -> int:
        """How often a part has ended by itself, whether it has started again by now or not."""
        return int(self.parts().get(name, {}).get("restarts", 0))

    def ready(self) -> bool:
        self.seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        states = self.states()
        return bool(states) and set(states.values()) == {"ready"}

    def started(self, name: str) -> list[list[str]]:
        lines = [line.split() for line in (self.folder / "started").read_text().splitlines()]
        return [line for line in lines if line[0] == name]

    def starts(self, name: str) -> list[float]:
        return [float(line[1]) for line in self.started(name)]

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 120.0) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=timeout_s)[0]

    def orphans(self) -> list[int]:
        return [pid for pid in self.seen if lives(pid)]


Start = Callable[..., Group]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a group of the given parts in a folder of its own; kills it at the end if it still runs."""
    groups: list[Group] = []

    def run(*parts: dict[str, Any]) -> Group:
        command = [sys.executable, "-c", GROUP, str(tmp_path), json.dumps(parts)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        groups.append(Group(tmp_path, process))
        return groups[-1]

    yield run
    for group in groups:
        if group.process.poll() is None:
            group.end(signal.SIGTERM)
        assert group.orphans() == []


def part(folder: Path, name: str, program: str = PART, **fields: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", program, str(folder), name]
    return {"name": name, "command": command, "flag": str(folder / name), **fields}


def test_parts_start_in_order_and_stop_in_order(start: Start, tmp_path: Path) -> None:
    group = start(
        part(tmp_path, "demo", after=["api", "engine"]),
        part(tmp_path, "console", after=["api"]),
        part(tmp_path, "engine"),
        part(tmp_path, "api", url="http://127.0.0.1:1"),
    )
    until(group.ready)
    assert group.starts("demo")[0] > max(group.starts("api")[0], group.starts("engine")[0])
    assert group.parts()["api"]["url"] == "http://127.0.0.1:1"
    assert psutil.pid_exists(group.parts()["engine"]["pid"])
    output = group.end(signal.SIGINT)
    assert group.process.returncode == 0
    assert (tmp_path / "ended").read_text().split() == ["demo", "engine", "api", "console"]
    assert set(group.states().values()) == {"stopped"}
    assert group.orphans() == []
    assert "Harli is ready" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_every_polite_signal_stops_the_group(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    group = start(part(tmp_path, "api"))
    until(group.ready)
    group.end(number)
    assert group.process.returncode == 0
    assert group.orphans() == []


def test_a_crashed_part_is_restarted_after_growing_pauses(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "api"), part(tmp_path, "engine"))
    until(group.ready)
    for crashes, pause_s in ((1, 1.0), (2, 2.0)):
        child = int(group.started("engine")[-1][2])
        killed_at = time.monotonic()
        os.kill(group.parts()["engine"]["pid"], signal.SIGKILL)
        until(lambda crashes=crashes: group.restarts("engine") == crashes)
        assert not lives(child), "what a crashed part left behind is ended before it starts again"
        # Ready it is at once, since what its first start left says so.
        until(lambda crashes=crashes: len(group.starts("engine")) == 1 + crashes and group.ready())
        assert pause_s <= group.starts("engine")[-1] - killed_at < pause_s + 60
        assert group.restarts("engine") == crashes
    assert len(group.starts("api")) == 1, "the other parts are left alone"
    said = group.end()
    for pause in ("1 s", "2 s"):
        assert f"was ended by SIGKILL; starts again in {pause}\n" in said


def test_a_part_that_cannot_start_ends_the_group_with_its_last_words(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "api"), part(tmp_path, "engine", "import sys; sys.exit('no such model: elephant')"))
    output = group.process.communicate(timeout=120)[0]
    assert group.process.returncode == 1
    assert "no such model: elephant" in output
    assert "engine.log" in output
    assert "[engine_start]" in output
    assert group.states() == {"api": "stopped", "engine": "failed"}


def test_a_part_that_is_not_essential_does_not_end_the_group(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "api"), part(tmp_path, "demo", "import sys; sys.exit(3)", essential=False))
    until(lambda: group.restarts("demo") and group.states()["api"] == "ready")
    assert group.process.poll() is None
    assert "ended with status 3" in group.end()


def test_a_part_that_never_gets_ready_is_given_up(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "engine", "import time; time.sleep(600)", start_timeout_s=1.0))
    output = group.process.communicate(timeout=120)[0]
    assert group.process.returncode == 1
    assert "not ready within 1 s" in output


def test_preparation_runs_once_and_shows_its_progress(start: Start, tmp_path: Path) -> None:
    steps = (
        "import sys, time; from pathlib import Path\n"
        "for fraction, step in ((0.10, 'reading'), (0.90, 'writing')):\n"
        "    print(f'{fraction:.2f}\\t{step}', flush=True)\n"
        "    while not Path(sys.argv[1], step).exists(): time.sleep(0.01)"
    )
    group = start(part(tmp_path, "engine", prepare=[sys.executable, "-c", steps, str(tmp_path)]))
    for step in ("reading", "writing"):
        until(lambda step=step: group.parts().get("engine", {}).get("message") == step)
        (tmp_path / step).touch()
    until(group.ready)
    os.kill(group.parts()["engine"]["pid"], signal.SIGKILL)
    until(lambda: group.restarts("engine") == 1 and group.ready())
    output = group.end()
    assert output.count("10% reading") == 1
    assert output.count("90% writing") == 1


def test_preparation_that_fails_ends_the_group(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "engine", prepare=[sys.executable, "-c", "import sys; sys.exit('disk full')"]))
    output = group.process.communicate(timeout=120)[0]
    assert group.process.returncode == 1
    assert "disk full" in output


def test_a_part_that_does_not_stop_is_killed_after_its_grace(start: Start, tmp_path: Path) -> None:
    deaf = part(tmp_path, "engine", DEAF, grace_s=1.0) | {"flag": str(tmp_path)}
    group = start(deaf)
    until(group.ready)
    until(lambda: "deaf" in (tmp_path / "logs" / "engine.log").read_text())
    before = time.monotonic()
    group.end()
    assert 1.0 <= time.monotonic() - before < 30.0
    assert group.orphans() == []


def test_a_second_interrupt_does_not_wait(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "engine", DEAF, grace_s=600.0) | {"flag": str(tmp_path)})
    until(group.ready)
    until(lambda: "deaf" in (tmp_path / "logs" / "engine.log").read_text())
    group.process.send_signal(signal.SIGINT)
    until(lambda: "asked" in (tmp_path / "logs" / "engine.log").read_text())
    group.end(signal.SIGINT)
    assert group.orphans() == []


def test_no_orphan_survives_a_killed_supervisor(start: Start, tmp_path: Path) -> None:
    deaf = part(tmp_path, "engine", DEAF, grace_s=2.0) | {"flag": str(tmp_path / "api")}
    group = start(part(tmp_path, "api", grace_s=2.0), deaf)
    until(group.ready)
    until(lambda: "deaf" in (tmp_path / "logs" / "engine.log").read_text())
    group.ready()
    assert len(group.seen) >= 4, "two parts, the child of one of them, the reaper"
    group.process.kill()
    group.process.wait()
    until(lambda: not group.orphans())
    assert (tmp_path / "ended").read_text().split() == ["api"], "it was asked to stop before it would have been killed"
    assert not (tmp_path / "run" / "parts.json").exists()


def test_the_next_group_waits_until_that_of_a_killed_supervisor_has_ended(start: Start, tmp_path: Path) -> None:
    engine = part(tmp_path, "engine", DEAF, grace_s=2.0) | {"flag": str(tmp_path)}
    group = start(engine)
    until(group.ready)
    until(lambda: "deaf" in (tmp_path / "logs" / "engine.log").read_text())
    before = group.parts()["engine"]["pid"]
    group.process.kill()
    group.process.wait()
    following = start(engine)
    assert lives(before)
    until(lambda: following.ready() and following.parts()["engine"]["pid"] != before)
    assert not lives(before)
    output = following.end()
    assert f"`harli up` (process {group.process.pid}) was killed; waiting" in output
    with hold(tmp_path):
        await_reaper(tmp_path, pytest.fail)  # whoever runs is not waited for


def test_down_waits_for_what_a_killed_supervisor_had_started(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "engine", DEAF, grace_s=1.0) | {"flag": str(tmp_path)})
    until(group.ready)
    until(lambda: "deaf" in (tmp_path / "logs" / "engine.log").read_text())
    engine = group.parts()["engine"]["pid"]
    group.process.kill()
    group.process.wait()
    assert lives(engine)
    down(tmp_path)
    assert not lives(engine)
    until(lambda: not group.orphans(), what="the reaper, which has let go of the lock, to end")


def test_a_killed_reaper_ends_nothing_and_another_takes_its_place(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "api", grace_s=2.0), part(tmp_path, "console", grace_s=2.0))
    until(group.ready)

    def reapers() -> list[int]:
        children = psutil.Process(group.process.pid).children()
        return [child.pid for child in children if "core.reaper" in child.cmdline()]

    (first,) = reapers()
    os.kill(first, signal.SIGKILL)
    os.kill(group.parts()["console"]["pid"], signal.SIGKILL)
    until(lambda: group.restarts("console") == 1 and len(group.starts("console")) == 2 and group.ready())
    assert len(reapers()) == 1 and first not in reapers()
    group.process.kill()
    group.process.wait()
    until(lambda: not group.orphans())


def test_logs_of_earlier_starts_are_kept(start: Start, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for number, name in enumerate(("api.log", "api.log.1", "api.log.2", "api.log.3")):
        (logs / name).write_text(f"run -{number}")
    group = start(part(tmp_path, "api"))
    until(group.ready)
    assert (logs / "api.log").read_text() == ""
    assert [(logs / f"api.log.{n}").read_text() for n in (1, 2, 3)] == ["run -0", "run -1", "run -2"]


def test_a_second_supervisor_on_the_same_data_directory_is_refused(start: Start, tmp_path: Path) -> None:
    group = start(part(tmp_path, "api"))
    until(group.ready)
    with pytest.raises(Conflict) as caught, hold(tmp_path):
        pass
    assert caught.value.code == "already_up"
    assert f"process {group.process.pid}" in caught.value.message
    assert "HARLI_DATA_DIR" in caught.value.message
    group.end()
    with hold(tmp_path):
        pass


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HarliError) as caught, hold(tmp_path / "file" / "data"):
        pass
    assert caught.value.code == "data_dir"
    assert str(tmp_path / "file" / "data") in caught.value.message


def test_taken_ports_are_named_with_holder_and_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [one.getsockname()[1], two.getsockname()[1]]
        parts = [
            Spec("api", (), ready=lambda _http, _process: True, port=("HARLI_API_PORT", ports[0])),
            Spec("engine", (), ready=lambda _http, _process: True, port=("HARLI_ENGINE_PORT", ports[1])),
        ]
        with pytest.raises(Conflict) as caught:
            check_ports("127.0.0.1", parts)
    assert caught.value.code == "port_taken"
    assert caught.value.param == "api_port"
    for word in (*map(str, ports), f"process {os.getpid()}", "HARLI_API_PORT", "HARLI_ENGINE_PORT"):
        assert word in caught.value.message
    check_ports("127.0.0.1", parts)


def test_the_parts_of_harli(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    names = [spec.name for spec in specs(settings, demo=True, console=True)]
    assert names == ["api", "engine", "console", "demo"]
    assert [spec.name for spec in specs(settings, demo=False, console=False)] == ["api", "engine"]
    engine = specs(settings, demo=False, console=False)[1]
    assert engine.prepare is not None, "the bundled model has yet to be converted"
    assert engine.grace_s >= 30, "time for a checkpoint"


def test_an_engine_is_ready_by_its_own_report_and_not_by_that_of_one_that_has_died(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "SILENCE_S", 600.0)  # the API has yet to miss the one that died
    # An engine's report is of its scheduler, a child of the process that the supervisor started.
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    first, second = (subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(2))
    with (
        closing(AdapterServer()) as http_server,
        served(data_dir, engine_port=int(http_server.url.rpartition(":")[2])) as settings,
        plain(settings) as api,
        httpx.Client(trust_env=False) as http,
    ):
        assert settings.link_url is not None
        (engine,) = (spec for spec in specs(settings, demo=False, console=False) if spec.name == "engine")
        peers = []
        try:
            for process, others in ((first, [second]), (second, [first])):
                assert process.stdout is not None
                scheduler = int(process.stdout.readline())
                assert not engine.ready(http, process.pid), "it has not reported yet"
                peers.append(EnginePeer(settings.link_url, f"engine-{len(peers)}"))
                peers[-1].hello(pid=scheduler)
                until(lambda process=process: engine.ready(http, process.pid))
                assert not any(engine.ready(http, other.pid) for other in others)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert api.get("/api/engine").json()["state"] == "ready"
        finally:
            for peer in peers:
                peer.close()
            for process in (first, second):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def test_a_wrong_model_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, engine=EngineSettings(model=tmp_path / "nowhere"))
    with pytest.raises(Invalid) as caught:
        specs(settings, demo=False, console=True)
    assert caught.value.code == "model_missing"
