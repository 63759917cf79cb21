"""What a check takes does not grow with the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import intake

MIB = 1 << 20
# In a process of its own, whose largest memory is the check's; what getrusage tells is the parent's, if that has more.
CHECK = """
import json, re, sys
from pathlib import Path
from core.intake import dataset
source = Path(sys.argv[1])
calls = []
report = dataset.ingest(source, source.with_suffix(".parquet"), filename=source.name, tokenizer=None,
                        progress=lambda done, total: calls.append(done))
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"peak": peak, "rows": report.rows, "calls": len(calls), "most": max(calls)}))
"""


def checked(path: Path) -> Any:
    done = subprocess.run([sys.executable, "-c", CHECK, path], capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout)


def test_a_file_ten_times_as_long_takes_no_more_memory(tmp_path: Path) -> None:
    found = []
    for mib in (6, 60):
        path = tmp_path / f"{mib}.jsonl"
        rows = intake.generate(path, mib * MIB)
        found.append(checked(path))
        assert found[-1]["rows"] == rows
        assert found[-1]["most"] <= path.stat().st_size
    short, long = found
    assert long["peak"] < 300 * MIB
    assert long["peak"] - short["peak"] < 27 * MIB, "what allocators keep; the file is 54 MiB longer"
    assert long["calls"] > 4 * short["calls"], "progress is told as it goes"
