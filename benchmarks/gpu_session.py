"""Everything that needs a GPU, in order of worth, within a time limit: tests, benchmarks, memory checks.

    python -m benchmarks.gpu_session DIR --trace azure_conv.csv --data rows.parquet --minutes 27

Needed are one H200 (or what is like it), torch for it, SGLang, and the project installed with its native module
(`pip install --no-deps --editable .`). The first engine on a fresh machine takes one to two minutes longer than those
after it, for imports and kernels that are compiled; `python -m compileall -j 0` over the packages first saves most.

Each part is a process with a log in DIR and a limit of time; after each, the results files that it wrote are copied
there and DIR/session.json says what is through. A part that fails or runs out of time does not end the session, and one
for which too little time is left is passed over. The same command with the same DIR goes on where the last one stopped;
--again has all parts run anew. --dry lists the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page import table
from benchmarks.record import RESULTS

ROOT = Path(__file__).resolve().parent.parent
START_S, LEAST_SOAK_S = 130.0, 100.0  # of an engine that takes its profile, warm; of a soak that is worth that
END_S = 20.0  # for a part's processes to end in order


class Part(NamedTuple):
    """what: for people; seconds: about what it takes, engine's start and compilation included, 0 for what takes all the
    time that is left; it is ended after one and a half times that."""

    name: str
    what: str
    seconds: float
    command: Sequence[str]


def parts(folder: Path, trace: Path | None, data: Path | None) -> list[Part]:
    """In order of worth; without a trace there is no replay of one. folder: where the session keeps what it makes."""
    tuned = ["env", f"SGLANG_LORA_CONFIG_DIR={folder / 'lora'}", sys.executable]  # as one of the parts has found it

    def test(*paths: str) -> list[str]:
        # Without conftest.py, which imports packages of the whole project: these tests need none of it.
        return ["-m", "pytest", "--noconftest", "-q", "--durations=5", *paths]

    def live(*more: str) -> list[str]:
        given = [*(("--trace", str(trace)) if trace else ()), *(("--data", str(data)) if data else ())]
        return [*tuned, "-m", "benchmarks.live", *given, *more]

    def memcheck(*tests: str) -> list[str]:
        return ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, *test(*tests)]

    each_row = "tests/serving/test_lora_kernels.py::test_each_row_gets_what_its_adapter_adds"
    large = ["--shape", "llama-3-8b", "--attention", "fa3", "--memory", "0.45", "--plain-memory", "0.6",
             "--places", "128"]  # fmt: skip
    plain = ["-m", "benchmarks.frontier", "--attention", "fa3"]
    frontier = [*tuned, *plain]
    few = ["--few", "harli", "tasklet_slices", "step_slices", "chunked"]

    def lora(kernels: str) -> Part:
        return Part(f"lora_{kernels}", f"decode with other LoRA kernels, {kernels}", 110,
                    [*plain, "--lora", kernels, "--batches", "32", "128", "--splits", "96", "--steps", "100",
                     "--policies", "--few", "--seconds", "100", "--name", f"frontier_lora_{kernels}"])  # fmt: skip

    found = [
        Part("tests", "partitions, executor and captured tasklets on the device", 100,
             test("tests/serving/test_lora_kernels.py", "tests/serving/test_branches.py",
                  "tests/partition/test_green.py", "tests/runtime/test_streams.py", "tests/runtime/test_gpu_watch.py",
                  "tests/finetune/test_captured.py", "tests/finetune/test_captured_job.py",
                  "tests/finetune/test_streamed_gpu.py")),
        Part("lora_kernels", "LoRA kernels, ours and SGLang's, whose best blocks are used from here on", 45,
             ["-m", "benchmarks.lora_kernels", "--configs", str(folder / "lora")]),
        Part("frontier", "every layout and the policies at batches of 32 and 128", 440,
             [*frontier, "--batches", "32", "128", "--policies", "hybrid", *few, "--seconds", "430"]),
        Part("live", "the first start with its profile; no job against SGLang alone; checkpoints; replay; decode-only",
             640, live("--parts", "profile", "no_job", "checkpoints", *(("replay",) if trace else ()), "decode_only",
                       "--steps", "10000", "--speeds", "1", "4", "--seconds", "20", "--limit-s", "540", *large)),
        Part("tokens", "256 greedy answers with and without a job", 160,
             live("--parts", "tokens", "--shape", "bundled", "--micro-batch-tokens", "512", "--memory", "0.3",
                  "--partitions", "2")),
        Part("kernels", "Triton kernels against plain torch", 40, test("tests/finetune/test_kernels.py")),
        Part("memcheck", "compute-sanitizer over every kernel, each tensor in an allocation of its own", 60,
             ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *memcheck("tests/finetune/test_kernels.py", each_row)]),
        Part("memcheck_job", "compute-sanitizer over a small captured job", 60,
             memcheck("tests/finetune/test_captured_job.py::test_metrics_are_those_of_the_eager_trainer")),
        Part("arena", "the arena on the driver's own pages", 20, test("tests/memory/test_gpu.py")),
        Part("exclusive", "our trainer alone, and the bound of its matrix products", 45,
             ["-m", "benchmarks.exclusive", "--trainers", "products,harli", "--seconds", "3"]),
    ]  # fmt: skip
    if trace is not None:
        found.append(Part("soak", "the trace beside a job for as long as there is time, ten minutes at most", 0.0,
                          live("--parts", "soak", "--soak-s", "{seconds}", *large)))  # fmt: skip
    return [
        *found,
        Part("qwen", "the frontier of Qwen2.5-7B's shape at batches of 32 and 128", 230,
             [*frontier, "--model", "qwen2.5-7b", "--batches", "32", "128", "--steps", "150", "--splits", "96", "64",
              "32", "--policies", "hybrid", "--few", "--seconds", "220", "--name", "frontier_qwen"]),
        lora("csgmv"),
        lora("triton"),
        Part("batches", "the frontier at batches of 8 and 64", 160,
             [*frontier, "--batches", "8", "64", "--steps", "120", "--policies", "hybrid", "--few", "--seconds", "140",
              "--name", "frontier_batches"]),
        Part("memory", "pages between KV cache and finetuning, and how many requests fit beside a job", 280,
             ["-m", "benchmarks.memory", *(("--data", str(data)) if data else ()), "--seconds", "8", "--quiet", "12",
              "--burst", "30"]),
    ]  # fmt: skip


def run(part: Part, folder: Path, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run it for at most so long; how it ended."""
    program = [] if shutil.which(part.command[0]) else [sys.executable]
    command = [*program, *(word.format(seconds=round(min(600.0, seconds - START_S))) for word in part.command)]
    began, before = time.monotonic(), _used_mib()
    with (folder / f"{part.name}.log").open("ab") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, process_group=0,
            env=os.environ | environment | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            state = "through" if process.wait(seconds) == 0 else f"failed ({process.returncode})"
        except subprocess.TimeoutExpired:
            state = f"ended after {seconds:.0f} s"
        finally:
            _end(process)
    return {"state": state, "seconds": round(time.monotonic() - began), "gpu_mib_before": before,
            "gpu_mib_after": _used_mib()}  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the part's processes: a group of their own."""
    for number, patience in ((signal.SIGTERM, END_S), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + patience
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.2)
            continue
        return


def _used_mib() -> int | None:
    """Memory of the first GPU in use: what a part left behind shows here."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])


def plugin_path(folder: Path) -> dict[str, str]:
    """The environment in which SGLang finds the project's plugin also where the project is not installed."""
    try:
        distribution("harli")
        return {}
    except PackageNotFoundError:
        info = folder / "site" / "harli-0.1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: harli\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nharli = core.serving.plugin:register\n")
        paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    """Run the session; the exit status is 1 when a part did not come through."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("folder", type=Path, metavar="DIR")
    arguments.add_argument("--trace", type=Path, help="arrivals to replay, a CSV or JSONL file")
    arguments.add_argument("--data", type=Path, help="a normalised data set; without one the sample is taken in")
    arguments.add_argument("--minutes", type=float, default=27.0)
    arguments.add_argument("--parts", nargs="+", help="these only, in this order")
    arguments.add_argument("--again", action="store_true", help="also what is through already")
    arguments.add_argument("--dry", action="store_true", help="list the parts and about what they take")
    options = arguments.parse_args()
    every = {part.name: part for part in parts(options.folder.resolve(), options.trace, options.data)}
    if unknown := set(options.parts or ()) - set(every):
        arguments.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    chosen = [every[name] for name in options.parts or every]
    if options.dry:
        _list(chosen)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a part that runs is ended too
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "session.json"
    done: dict[str, Any] = json.loads(file.read_text()) if file.is_file() and not options.again else {}
    deadline = time.monotonic() + 60.0 * options.minutes
    environment = plugin_path(options.folder.resolve())
    for part in chosen:
        left = deadline - time.monotonic() - END_S
        if done.get(part.name, {}).get("state") == "through":
            continue
        if left < (part.seconds or START_S + LEAST_SOAK_S):
            done[part.name] = {"state": "no time left"}
        else:
            print(f"{part.name}: {part.what}", flush=True)
            started = time.time()
            seconds = min(left, 1.5 * part.seconds if part.seconds else START_S + 660.0)
            done[part.name] = run(part, options.folder, seconds, environment)
            _collect(started, options.folder)
            print(f"{part.name}: {done[part.name]}", flush=True)
        file.write_text(json.dumps(done, indent=1))
    rows = [[n, of["state"], of.get("seconds", ""), of.get("gpu_mib_after", "")] for n, of in done.items()]
    print(table(["part", "state", "s", "MiB left in use"], rows))
    sys.exit(any(of["state"] != "through" for of in done.values()))


def _collect(since: float, folder: Path) -> None:
    """Copy the results files that were written since then."""
    for path in RESULTS.glob("*.json*"):
        if path.stat().st_mtime >= since:
            shutil.copy(path, folder / path.name)


def _list(chosen: Sequence[Part]) -> None:
    rows, total = [], 0.0
    for part in chosen:
        total += part.seconds
        rows.append([part.name, part.what, f"{part.seconds:.0f}", f"{total / 60:.1f}"])
    print(table(["part", "what", "s", "minutes until then"], rows))


if __name__ == "__main__":
    main()
