"""`harli doctor`: what this machine has, what will be used of it, what is missing and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from core.config import Settings
from core.errors import HarliError
from core.serving import model_folder
from core.serving.versions import SGLANG, require_sglang
from core.supervise import hold, holder, is_free

# What tells how fast a CPU multiplies: vectors of 256 and 512 bits, bfloat16 and int8 in hardware, matrix tiles.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
# SGLang's wheel is built for this C library.
_GLIBC = (2, 34)
# What the processes of a CPU machine take beside twice the weights, with a job running: 4.4 GiB in all (proportional
# set sizes) were seen with the bundled model.
_LIBRARIES_GIB = 3.4
# The bundled model's folder takes a quarter of it; data sets, adapters and checkpoints come on top.
_LEAST_FREE_GIB = 2.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. level: ok; note (worth knowing); missing (Harli does not run without it)."""

    topic: str
    level: Literal["ok", "note", "missing"]
    value: str
    remedy: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Look at everything; takes a few seconds, most of them for importing torch."""
    return [
        *_system(),
        *_memory(settings),
        *_gpu(),
        *_packages(),
        *_engine(settings),
        *_data(settings),
        *_ports(settings),
        *_database(settings),
        *_tests(),
    ]


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether Harli can run."""
    return all(finding.level != "missing" for finding in findings)


def show(findings: Sequence[Finding]) -> None:
    """Print the findings for people."""
    from rich.markup import escape
    from rich.table import Table

    from core.printing import out

    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(marks[finding.level], finding.topic, escape(finding.value))
        if finding.remedy:
            table.add_row("", "", f"[bold]→ {escape(finding.remedy)}[/]")
    out.print(table)
    missing = sum(finding.level == "missing" for finding in findings)
    out.print("Harli can run here." if not missing else f"[red]Harli cannot run yet: {missing} missing.[/]")


# ---- the machine -----------------------------------------------------------------------------------------------------


def _system() -> Iterator[Finding]:
    name, number = platform.libc_ver()
    old = name == "glibc" and tuple(int(part) for part in number.split(".")[:2]) < _GLIBC
    yield Finding(
        "system",
        "missing" if old or sys.platform != "linux" else "ok",
        f"{_distribution()}, {platform.system()} {platform.release()}, {platform.machine()}, {name} {number}",
        f"use Linux with glibc {_GLIBC[0]}.{_GLIBC[1]} or newer, which SGLang's package needs" if old else "",
    )
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    model, flags = _cpu()
    cores = len(os.sched_getaffinity(0))
    fast = [flag for flag in _CPU_FLAGS if flag in flags]
    yield Finding("cpu", "ok", f"{model}, {cores} cores usable, {', '.join(fast) or 'no AVX2'}")


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "unknown distribution"


def _cpu() -> tuple[str, set[str]]:
    model, flags = platform.processor() or platform.machine(), set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
            break
    return model, flags


def _memory(settings: Settings) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    need = _LIBRARIES_GIB + 2 * _weights_gib(settings)
    free = memory.available / 2**30
    short = free < need
    yield Finding(
        "memory",
        "note" if short else "ok",
        f"{memory.total / 2**30:.1f} GiB, {free:.1f} GiB available; the engine and its companions take about "
        f"{need:.1f} GiB on a CPU",
        "close other programs, or serve a smaller model" if short else "",
    )


def _weights_gib(settings: Settings) -> float:
    """Size of the served model's weights; the bundled model's package (a quarter of it) when not yet converted."""
    try:
        folder = model_folder.location(settings)
        if folder is not None:
            return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**30
        # From 4 bits and two scales a block to float32.
        return 5.5 * model_folder.package_file().stat().st_size / 2**30
    except HarliError:
        return 0.0


def _gpu() -> Iterator[Finding]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield Finding("gpu", "note", "no NVIDIA driver; the engine runs on the CPU")
        return
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            yield Finding(
                "gpu",
                "ok",
                f"{pynvml.nvmlDeviceGetName(handle)}, {memory.total / 2**30:.0f} GiB, "
                f"{memory.free / 2**30:.0f} GiB free, driver {driver} (CUDA {cuda // 1000}.{cuda % 1000 // 10})",
            )
    finally:
        pynvml.nvmlShutdown()


# ---- what is installed -----------------------------------------------------------------------------------------------


def _packages() -> Iterator[Finding]:
    try:
        require_sglang()
        yield Finding("sglang", "ok", f"{version('sglang')}, the version Harli's hooks were written for")
    except HarliError as error:
        yield Finding("sglang", "missing", error.message, f"run `make run` again: it installs sglang=={SGLANG}")
    for name in ("transformers", "peft", "streamlit"):
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            yield Finding(name, "missing", "not installed", "run `make run` again")


def _engine(settings: Settings) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("torch", "missing", "not installed", "run `make run` again")
        return
    import torch

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    has_gpu = shutil.which("nvidia-smi") is not None
    unused = has_gpu and not torch.cuda.is_available()
    yield Finding(
        "torch",
        "note" if unused else "ok",
        f"{torch.__version__} ({build})" + (", which does not see the GPU" if unused else ""),
        "`make clean`, then `make run MACHINE=cuda`, and a driver for CUDA 13" if unused else "",
    )
    from core.serving.launch import resolve_device

    try:
        device = resolve_device(settings.engine.device)
    except HarliError as error:
        yield Finding("engine", "missing", error.message)
        return
    dtype = settings.engine.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    yield Finding("engine", "ok", f"will serve on {device} in {dtype}")
    if device == "cuda" and shutil.which("nvcc") is None:
        yield Finding(
            "nvcc",
            "note",
            "not on the PATH; the first start on a GPU compiles a kernel with it",
            "install the CUDA 13 toolkit and put its bin folder on the PATH",
        )


# ---- what is configured ----------------------------------------------------------------------------------------------


def _data(settings: Settings) -> Iterator[Finding]:
    folder = settings.data_dir
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if not (os.access(existing, os.W_OK) and existing.is_dir()):
        remedy = "set HARLI_DATA_DIR to a folder that this user may write"
        yield Finding("data directory", "missing", f"{folder} cannot be written", remedy)
    else:
        scarce = free < _LEAST_FREE_GIB
        yield Finding(
            "data directory",
            "note" if scarce else "ok",
            f"{folder}, {free:.1f} GiB free" if scarce else f"{folder}, {free:.0f} GiB free",
            "free some of its disk: the model, data sets, adapters and checkpoints lie there" if scarce else "",
        )
    try:
        model = model_folder.location(settings)
        if model is not None:
            yield Finding("model", "ok", str(model))
        else:
            model_folder.package_file()
            yield Finding("model", "ok", f"the bundled {model_folder.BUNDLED}; the first start converts it (once)")
    except HarliError as error:
        yield Finding("model", "missing", error.message)


def _ports(settings: Settings) -> Iterator[Finding]:
    if _is_up(settings):
        yield Finding("ports", "ok", f"`harli up` runs: console at {settings.console_url}, API at {settings.api_url}")
        return
    for name in ("api", "engine", "console"):
        port = getattr(settings, f"{name}_port")
        if is_free(settings.host, port):
            yield Finding(f"{name} port", "ok", f"{port} of {settings.host} is free")
        else:
            remedy = f"stop it, or set HARLI_{name.upper()}_PORT to another port"
            yield Finding(f"{name} port", "missing", f"{port} of {settings.host} is held by {holder(port)}", remedy)


def _is_up(settings: Settings) -> bool:
    if not (settings.data_dir / "run" / "up.lock").exists():
        return False
    try:
        with hold(settings.data_dir):
            return False
    except HarliError:
        return True


def _database(settings: Settings) -> Iterator[Finding]:
    from sqlalchemy import create_engine, text
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    remedy = "correct HARLI_DATABASE_URL, e.g. postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
    try:
        url = make_url(settings.resolved_database_url)
    except ArgumentError:
        yield Finding("database", "missing", "HARLI_DATABASE_URL is no SQLAlchemy URL", remedy)
        return
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        yield Finding("database", "ok", f"{shown}, made at the first start")
        return
    try:
        engine = create_engine(url)
        with engine.connect() as connection:
            connection.execute(text("select 1"))
        engine.dispose()
    except (SQLAlchemyError, ImportError) as error:
        reason = str(getattr(error, "orig", error)).strip().splitlines()[0]
        yield Finding("database", "missing", f"{shown}: {reason}", f"start the server, or {remedy}")
        return
    yield Finding("database", "ok", f"{shown} answers")


def _tests() -> Iterator[Finding]:
    """What only the tests need."""
    for name, found in (
        ("chromium", _version("chromium", "chromium-browser", "google-chrome")),
        ("postgres", _postgres()),
    ):
        yield Finding(
            f"{name} (tests)",
            "ok" if found else "note",
            found or "not installed; only tests use it",
            "" if found else "scripts/system-packages.sh installs it where there is apt",
        )


def _version(*programs: str) -> str | None:
    path = next((found for program in programs if (found := shutil.which(program))), None)
    if path is None:
        return None
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return shown.stdout.strip() or path


def _postgres() -> str | None:
    # Debian keeps the server's programs off the PATH.
    return _version("postgres", *map(str, Path("/usr/lib/postgresql").glob("*/bin/postgres")))
