"""`harli up`: API, engine, console and demo as one group of processes that starts, heals and ends together.

Each part runs in a session of its own, so that a terminal's Ctrl-C reaches only the supervisor, which then stops the
parts in order. Should the supervisor be killed, the kernel tells each part (PR_SET_PDEATHSIG) and `core.reaper` ends
what is left of its group; until it has, the data directory is held. The state of the parts lies in
``<data_dir>/run/parts.json``, their output in ``<data_dir>/logs/<part>.log``.

Everything here runs in one thread: a loop that looks at the processes five times a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Literal

import httpx
import psutil
from pydantic import TypeAdapter

from core import locks
from core.api.schemas import Part
from core.client.token import Bearer
from core.config import Settings
from core.display import Display
from core.errors import Conflict, HarliError, NotFound, Unavailable
from core.serving import model_folder

Name = Literal["api", "engine", "console", "demo"]
Ready = Callable[[httpx.Client, int], bool]

STOP_ORDER: tuple[Name, ...] = ("demo", "engine", "api", "console")
_TICK_S = 0.2
_PROBE_S = 0.5
_PROBE_TIMEOUT_S = 2.0
_LONGEST_PAUSE_S = 30.0
_HEALTHY_S = 60.0
_KILLED_S = 10.0  # how long a killed group may take to be gone
_KEPT_LOGS = 3
_TAIL_LINES = 20
_DOWN_S = 90.0  # longer than the parts together may take
_PROGRESS = re.compile(r"([01]\.\d\d)\t(.+)")
_PARTS = TypeAdapter(list[Part])
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Spec:
    """A part to run.

    `prepare` runs to its end before the first start; lines ``FRACTION<tab>STEP`` that it prints are its progress.
    `ready` is asked while the part starts, with the id of the process that runs now. `after` names parts that must be
    ready before this one starts. `port` is (setting, number). An `essential` part that ends before it was ever ready
    ends the start of the whole group.
    """

    name: Name
    command: tuple[str, ...]
    ready: Ready
    prepare: tuple[str, ...] | None = None
    url: str | None = None
    port: tuple[str, int] | None = None
    after: tuple[Name, ...] = ()
    essential: bool = True
    start_timeout_s: float = 120.0
    grace_s: float = 10.0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    """A part's present state."""

    spec: Spec
    log: Path
    part: Part
    process: subprocess.Popen[bytes] | None = None
    preparing: bool = False
    prepared: bool = False
    was_ready: bool = False
    failures: int = 0
    since: float = 0.0
    next_probe: float = 0.0
    log_from: int = 0
    start_at: float = 0.0


def specs(settings: Settings, *, demo: bool, console: bool) -> list[Spec]:
    """The parts of Harli as `settings` want them."""
    api, engine = settings.api_url, settings.engine_url
    python = (sys.executable, "-m")
    parts = [
        Spec(
            name="api",
            command=(*python, "core.api"),
            ready=lambda http, _process: _answers(http, f"{api}/api/health"),
            url=api,
            port=("HARLI_API_PORT", settings.api_port),
        ),
        Spec(
            name="engine",
            command=(*python, "core.serving"),
            ready=lambda http, process: (
                _answers(http, f"{engine}/health") and _engine_reported(http, api, settings.token_file, process)
            ),
            prepare=(*python, "core.serving.model_folder") if model_folder.location(settings) is None else None,
            url=f"{engine}/v1",
            port=("HARLI_ENGINE_PORT", settings.engine_port),
            start_timeout_s=settings.engine.start_timeout_s,
            grace_s=30.0,
        ),
    ]
    if console:
        parts.append(
            Spec(
                name="console",
                command=(*python, "streamlit", "run", str(_console_file()), *_console_options(settings)),
                ready=lambda http, _process: _answers(http, f"{settings.console_url}/_stcore/health"),
                url=settings.console_url,
                port=("HARLI_CONSOLE_PORT", settings.console_port),
                after=("api",),
            )
        )
    if demo:
        parts.append(
            Spec(
                name="demo",
                command=(*python, "core.demo"),
                ready=lambda _http, _process: True,
                after=("api", "engine"),
                essential=False,
            )
        )
    return parts


def _console_file() -> Path:
    spec = importlib.util.find_spec("app.main")
    if spec is None or spec.origin is None:
        raise HarliError("console_missing", "the console (app/main.py) is not installed; use --no-console")
    return Path(spec.origin)


def _console_options(settings: Settings) -> list[str]:
    """Where the console listens; everything else about it stands in app/.streamlit/config.toml."""
    return [f"--server.address={settings.host}", f"--server.port={settings.console_port}"]


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _engine_reported(http: httpx.Client, api_url: str, token_file: Path, group: int) -> bool:
    """Whether the API knows the engine of the process group as ready: the link between them is up. For a while it may
    know the one before, which has died, as that."""
    try:
        answer = http.get(f"{api_url}/api/engine", auth=Bearer(api_url, token_file))
        if answer.status_code != httpx.codes.OK:
            return False
        engine = answer.json()
        return engine["state"] == "ready" and os.getpgid(engine["pid"]) == group
    except (httpx.HTTPError, ValueError, KeyError, TypeError, ProcessLookupError):
        return False


# ---- before anything starts ------------------------------------------------------------------------------------------


@contextmanager
def hold(data_dir: Path) -> Iterator[IO[str]]:
    """Hold the data directory for one supervisor, and for whoever inherits the locked file. Raises Conflict when
    another one holds it, HarliError when it cannot be written."""
    path = data_dir / "run" / "up.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (data_dir / "logs").mkdir(exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise HarliError(
            "data_dir", f"data directory {data_dir} cannot be used: {error}; set HARLI_DATA_DIR", "data_dir"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise Conflict(
                "already_up",
                f"`harli up` (process {file.read().strip() or 'unknown'}) already runs on data directory {data_dir}; "
                "stop it with `harli down`, or set HARLI_DATA_DIR and other ports for a second one",
                "data_dir",
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file


def await_reaper(data_dir: Path, say: Callable[[str], None]) -> None:
    """Be back once what a killed supervisor had started has ended, and with it its ports and its GPU memory are free;
    `say` is told when that takes time. Raises Conflict when it does not end."""
    path = data_dir / "run" / "up.lock"
    deadline = time.monotonic() + _DOWN_S
    told = False
    while path.exists() and not _is_free_lock(path):
        process = path.read_text()
        if not process or _runs(int(process)):
            return
        if time.monotonic() > deadline:
            raise Conflict(
                "still_ending",
                f"what a `harli up` that was killed (process {process}) had started on data directory {data_dir} has "
                f"not ended after {_DOWN_S:.0f} s; see `ps -ef | grep core.` and end what is left of it",
                "data_dir",
            )
        if not told:
            say(f"`harli up` (process {process}) was killed; waiting until what it had started has ended")
            told = True
        time.sleep(0.1)


def _runs(process: int) -> bool:
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def down(data_dir: Path) -> None:
    """Stop the supervisor that holds the data directory, and be back when it has ended. Raises NotFound when there is
    none, HarliError when it does not end."""
    path = data_dir / "run" / "up.lock"
    if not path.exists() or _is_free_lock(path):
        raise NotFound("not_up", f"no `harli up` runs on data directory {data_dir}; nothing is stopped", "data_dir")
    process = int(path.read_text())
    with suppress(ProcessLookupError):  # one that was killed: its reaper ends the parts
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while not _is_free_lock(path):
        if time.monotonic() > deadline:
            raise HarliError("still_up", f"`harli up` (process {process}) has not ended after {_DOWN_S:.0f} s")
        time.sleep(0.1)


def _is_free_lock(path: Path) -> bool:
    with path.open("a+") as file:
        return not locks.is_held(file)


def check_ports(host: str, parts: Sequence[Spec]) -> None:
    """Raises Conflict that names every port that is taken, its holder where that can be known, and the setting."""
    taken = [(spec, *spec.port) for spec in parts if spec.port and not is_free(host, spec.port[1])]
    if taken:
        faults = [
            f"port {port} of {host}, for the {spec.name}, is held by {holder(port)} (choose another: {setting}=...)"
            for spec, setting, port in taken
        ]
        raise Conflict("port_taken", "; ".join(faults), taken[0][1].removeprefix("HARLI_").lower())


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # As servers do: connections of an earlier run that linger do not hold the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """The program that listens on `port`, as far as this user may know."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another program"


# ---- the group -------------------------------------------------------------------------------------------------------


class Supervisor:
    """Runs parts until it is asked to stop or a part cannot be started. `lock`: the file that holds `data_dir`."""

    def __init__(self, data_dir: Path, parts: Sequence[Spec], display: Display, lock: IO[str]) -> None:
        self._lock = lock
        self._state_file = data_dir / "run" / "parts.json"
        self._display = display
        now = datetime.now(UTC)
        self._parts: dict[Name, _Running] = {
            spec.name: _Running(
                spec,
                data_dir / "logs" / f"{spec.name}.log",
                Part(name=spec.name, state="starting", url=spec.url, since=now),
            )
            for spec in parts
        }
        self._http = httpx.Client(timeout=_PROBE_TIMEOUT_S, trust_env=False)
        self._interrupts = 0
        self._announced = False
        self._reaper: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the parts, keep them running, and stop them all at SIGINT, SIGTERM or SIGHUP.

        Raises Unavailable, with the last lines of its log, when an essential part ends before it was ever ready; the
        others are stopped then too.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._interrupt)
        self._start_reaper()
        for running in self._parts.values():
            _rotate(running.log)
        self._save()
        try:
            while not self._interrupts:
                if self._reaper is not None and self._reaper.poll() is not None:  # somebody killed it
                    self._start_reaper()
                for running in self._parts.values():
                    self._look_after(running)
                if not self._announced and all(r.part.state == "ready" for r in self._parts.values()):
                    self._announced = True
                    self._display.all_ready([r.part for r in self._parts.values()])
                time.sleep(_TICK_S)
        finally:
            self._stop_all()

    def _interrupt(self, _number: int, _frame: object) -> None:
        self._interrupts += 1

    # ---- one part ----

    def _look_after(self, running: _Running) -> None:
        now = time.monotonic()
        if running.process is None:
            waits = any(self._parts[name].part.state != "ready" for name in running.spec.after if name in self._parts)
            if now >= running.start_at and not waits:
                self._launch(running)
        elif running.process.poll() is not None:
            self._ended(running, running.process.returncode)
        elif running.part.state == "starting":
            self._watch_start(running, now)

    def _launch(self, running: _Running) -> None:
        spec = running.spec
        running.preparing = spec.prepare is not None and not running.prepared
        command = spec.prepare if running.preparing and spec.prepare is not None else spec.command
        with running.log.open("ab") as log:
            running.log_from = log.tell()
            running.process = _spawn(command, spec.env, log)
        self._tell_reaper("+", running.process.pid)
        running.since = running.next_probe = time.monotonic()
        self._change(running, "starting")

    def _watch_start(self, running: _Running, now: float) -> None:
        spec = running.spec
        if now < running.next_probe:
            return
        running.next_probe = now + _PROBE_S
        progress = _PROGRESS.fullmatch(tail(running.log, 1, running.log_from).strip())
        if progress and progress[2] != running.part.message:
            running.part = running.part.model_copy(update={"message": progress[2]})
            self._save()
        self._display.starting(running.part, float(progress[1]) if progress else None)
        assert running.process is not None
        if not running.preparing and spec.ready(self._http, running.process.pid):
            running.was_ready = True
            running.since = time.monotonic()
            self._change(running, "ready")
        elif now - running.since > spec.start_timeout_s:
            os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
            self._failed(running, f"was not ready within {spec.start_timeout_s:.0f} s")

    def _ended(self, running: _Running, status: int) -> None:
        if running.preparing and status == 0:
            self._clear_group(running)
            running.prepared = True
            self._launch(running)
            return
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._failed(running, how)

    def _failed(self, running: _Running, how: str) -> None:
        """Start the part again after a pause of 1, 2, 4 ... 30 s, or give up on a part that never was ready."""
        self._clear_group(running)
        if running.spec.essential and not running.was_ready:
            self._change(running, "failed", how)
            words = tail(running.log, _TAIL_LINES, running.log_from)
            raise Unavailable(
                f"{running.spec.name}_start", f"the {running.spec.name} {how}. The end of {running.log}:\n{words}"
            )
        if running.part.state == "ready" and time.monotonic() - running.since > _HEALTHY_S:
            running.failures = 0
        pause_s = min(2.0**running.failures, _LONGEST_PAUSE_S)
        running.failures += 1
        running.start_at = time.monotonic() + pause_s
        running.part = running.part.model_copy(update={"restarts": running.part.restarts + 1})
        self._change(running, "backing_off", f"{how}; starts again in {pause_s:.0f} s")

    def _clear_group(self, running: _Running) -> None:
        """End whatever a part's process has left behind in its group, and wait until it has let go of its ports."""
        if running.process is not None:
            group = running.process.pid
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            until = time.monotonic() + _KILLED_S
            while _group_lives(group) and time.monotonic() < until:
                time.sleep(0.02)
            self._tell_reaper("-", group)
            running.process = None

    # ---- the end ----

    def _stop_all(self) -> None:
        """Ask the parts to stop, in order; a second interrupt kills what is left."""
        self._display.stopping()
        first = self._interrupts
        for running in sorted(self._parts.values(), key=lambda r: STOP_ORDER.index(r.spec.name)):
            if running.process is not None:
                self._stop(running, first)
            if running.part.state != "failed":
                self._change(running, "stopped")
        self._http.close()
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait()
        self._display.close()

    def _stop(self, running: _Running, first: int) -> None:
        process = running.process
        assert process is not None
        process.terminate()
        deadline = time.monotonic() + running.spec.grace_s
        while process.poll() is None and time.monotonic() < deadline and self._interrupts <= max(first, 1):
            time.sleep(0.05)
        self._clear_group(running)
        process.wait()

    # ---- bookkeeping ----

    def _change(
        self,
        running: _Running,
        state: Literal["starting", "ready", "backing_off", "stopped", "failed"],
        message: str = "",
    ) -> None:
        running.part = running.part.model_copy(
            update={
                "state": state,
                "message": message,
                "pid": running.process.pid if running.process is not None else None,
                "since": datetime.now(UTC),
            }
        )
        self._save()
        self._display.changed(running.part)

    def _save(self) -> None:
        partial = self._state_file.with_suffix(".partial")
        partial.write_bytes(_PARTS.dump_json([running.part for running in self._parts.values()], indent=1))
        partial.replace(self._state_file)

    def _start_reaper(self) -> None:
        grace_s = max((running.spec.grace_s for running in self._parts.values()), default=0.0)
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "core.reaper", str(grace_s), str(self._state_file)],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=(self._lock.fileno(),),
        )
        for running in self._parts.values():
            if running.process is not None:
                self._tell_reaper("+", running.process.pid)

    def _tell_reaper(self, sign: Literal["+", "-"], group: int) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            with suppress(BrokenPipeError):  # one that was killed: the next is told all groups
                self._reaper.stdin.write(f"{sign}{group}\n".encode())


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs; one that ended and was not collected does not."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _spawn(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def die_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request was made
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        start_new_session=True,
        # Safe here: this process has one thread, and the function makes two system calls.
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )


# ---- logs ------------------------------------------------------------------------------------------------------------


def _rotate(log: Path) -> None:
    """Keep the logs of the last starts as .1 (the newest), .2 ..."""
    for number in range(_KEPT_LOGS, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        newer = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
        if newer.exists():
            newer.replace(older)


def tail(log: Path, lines: int, start: int = 0) -> str:
    """The last `lines` lines of what stands from byte `start` on, of at most the last 64 KiB."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - (1 << 16)))
        return b"\n".join(file.read().splitlines()[-lines:]).decode("utf-8", "replace")


# ---- the command -----------------------------------------------------------------------------------------------------


def up(settings: Settings, *, demo: bool = False, console: bool = True) -> None:
    """Run Harli until it is interrupted. Raises HarliError when it cannot start."""
    await_reaper(settings.data_dir, print)
    with hold(settings.data_dir) as lock:
        parts = specs(settings, demo=demo, console=console)
        check_ports(settings.host, parts)
        Supervisor(settings.data_dir, parts, Display(settings), lock).run()
