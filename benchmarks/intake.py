"""How fast intake takes a large file in, in how much memory, and how soon it lets go when it is cancelled.

Writes a JSONL of chats (1 GiB by default; words, lengths and turns vary, some rows repeat), then, each in a process of
its own: the structural pass (parse, check, normalise, duplicates, lengths, languages; no tokenizer), the same with a
cancel in the middle, and a part of it with a model's tokenizer, which also renders and encodes every row; then what a
job takes to load those rows, in CPU time of its thread.

    python -m benchmarks.intake --model ~/.local/share/harli/models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import record

MIB = 1 << 20
_COMMON = """the a of to and in is it you that he was for on are with as they at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could people my
than first water been call who oil its now find long down day did get come made may part harbour tide anchor"""
WORDS = _COMMON.split()
# Where a chat is told from those that have the same words.
_NUMBER = "#NUMBER"


def generate(path: Path, size: int, seed: int = 0) -> int:
    """Write chats until the file has `size` bytes; the number of rows."""
    rng = random.Random(seed)
    pieces = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 40))) for _ in range(20_000)]
    chats = []
    for _ in range(20_000):
        turns = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            turns.append({"role": "user", "content": f"{rng.choice(pieces)}?"})
            turns.append({"role": "assistant", "content": f"{rng.choice(pieces)}, {rng.choice(pieces)}. {_NUMBER}"})
        chats.append(json.dumps({"messages": turns}) + "\n")
    written = rows = 0
    with path.open("w") as file:
        while written < size:
            block = [rng.choice(chats).replace(_NUMBER, str(rows + at)) for at in range(1000)]
            block[-1] = block[0]
            rows += len(block)
            written += file.write("".join(block))
    return rows


def take(path: Path, model: Path | None, cancel_after_s: float | None) -> dict[str, Any]:
    """Take the file in, in this process; what it took."""
    from core.intake import dataset, packing, tokenizer

    tokens = tokenizer.load(model) if model is not None else None
    cancelled = threading.Event()
    asked_at = 0.0

    def cancel() -> None:
        nonlocal asked_at
        asked_at = time.perf_counter()
        cancelled.set()

    def progress(read: int, size: int) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt

    if cancel_after_s is not None:
        threading.Timer(cancel_after_s, cancel).start()
    size = path.stat().st_size
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        try:
            place = Path(folder) / "rows"
            report = dataset.ingest(path, place, filename=path.name, tokenizer=tokens, progress=progress)
        except KeyboardInterrupt:
            gone = not list(Path(folder).iterdir())
            return {"cancel_s": time.perf_counter() - asked_at, "nothing_left": gone}
        wall_s = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        stored = place.stat().st_size
        begun = time.thread_time()
        loaded = len(packing.load_encoded(place, tokens)) if tokens is not None else 0
        load_s = time.thread_time() - begun
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "bytes": size,
        "rows": report.rows,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "mb_s": size / 1e6 / wall_s,
        "mb_s_per_core": size / 1e6 / cpu_s,
        "rows_s": report.rows / wall_s,
        **({"load_us_per_row": 1e6 * load_s / loaded} if loaded else {}),
        # What else the machine did: CPU seconds grow with it, too.
        "load_average_1m": os.getloadavg()[0],
        "peak_resident_mib": after.ru_maxrss / 1024,
        "stored_bytes": stored,
        "findings": {finding.code: finding.count for finding in report.findings},
    }


def apart(path: Path, model: Path | None = None, cancel_after_s: float | None = None) -> dict[str, Any]:
    """`take` in a fresh process, whose memory is its own."""
    command = [sys.executable, "-m", "benchmarks.intake", "--take", str(path)]
    command += ["--model", str(model)] if model is not None else []
    command += ["--cancel-after-s", str(cancel_after_s)] if cancel_after_s is not None else []
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--tokenized-mib", type=int, default=32, help="size of the part that a tokenizer sees")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer; left out: no such part")
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    parser.add_argument("--take", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cancel-after-s", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.take is not None:
        print(json.dumps(take(arguments.take, arguments.model, arguments.cancel_after_s)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "chats.jsonl"
        generate(path, arguments.mib * MIB)
        body: dict[str, Any] = {"structural": apart(path)}
        body["cancelled"] = apart(path, cancel_after_s=body["structural"]["wall_s"] / 2)
        if arguments.model is not None:
            generate(path, arguments.tokenized_mib * MIB)
            body["tokenized"] = {"model": arguments.model.name, **apart(path, arguments.model)}
            seconds = body["tokenized"]["wall_s"] / 4
            body["tokenized_cancelled"] = apart(path, arguments.model, cancel_after_s=seconds)
    provenance = record.provenance("pyarrow", "msgspec", "numpy", "tokenizers")
    print(json.dumps(body, indent=2))
    print(record.write("intake", {"provenance": provenance, **body}))


if __name__ == "__main__":
    main()
