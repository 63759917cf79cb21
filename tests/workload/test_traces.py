"""Facts about reading, making and cutting arrival traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Invalid, NotFound
from core.workload.arrivals import Arrival
from core.workload.traces import cut, read_trace, synthetic, thinned, within

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_azure_times_are_rebased_and_keep_their_fractions(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:16:50.9951690,396,109\r\n")
    assert read_trace(path) == [(0.0, 374, 44), (pytest.approx(64.314579), 396, 109)]


def test_azure_times_may_carry_a_zone(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,2399,6\n")
    assert [a.time_s for a in read_trace(path)] == [0.0, pytest.approx(1.0)]


def test_burstgpt_leaves_out_failed_requests(tmp_path: Path) -> None:
    path = write(tmp_path, BURST + "5,ChatGPT,472,18,490,API log\n45,ChatGPT,1087,0,1087,API log\n46.5,GPT-4,3,9,12,\n")
    assert read_trace(path) == [(0.0, 472, 18), (41.5, 3, 9)]


def test_mooncake_times_are_milliseconds(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 6758, "output_length": 500, "hash_ids": [1]} for t in (1000, 3500)]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)) + "\n", "trace.jsonl")
    assert read_trace(path) == [(0.0, 6758, 500), (2.5, 6758, 500)]


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "2023-11-16 18:15:48,2,2\n2023-11-16 18:15:46,1,1\n")
    assert read_trace(path) == [(0.0, 1, 1), (2.0, 2, 2)]


def test_a_byte_order_mark_and_blank_lines_are_ignored_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeff" + AZURE + "\n2023-11-16 18:15:48,2,2\n\n2023-11-16 18:15:49,2,two\n")
    with pytest.raises(Invalid, match=r"trace\.csv, line 5: generatedtokens is 'two'.*remove the row"):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("yesterday,2,2", "timestamp is 'yesterday'"),
        ("2023-11-16 18:15:48,-4,2", "contexttokens is '-4'"),
        ("2023-11-16 18:15:48,0,2", "contexttokens is '0'"),
        ("2023-11-16 18:15:48,2.5,2", "contexttokens is '2.5'"),
        ("2023-11-16 18:15:48,nan,2", "contexttokens is 'nan'"),
        ("2023-11-16 18:15:48,1e30,2", "contexttokens is '1e30'"),
        ("2023-11-16 18:15:48,2", "the row has 2 cells, not 3"),
    ],
)
def test_a_bad_azure_row_is_named_by_line_field_and_value(tmp_path: Path, row: str, said: str) -> None:
    path = write(tmp_path, AZURE + row + "\n")
    with pytest.raises(Invalid, match="line 2: ") as caught:
        read_trace(path)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"timestamp": 0, "input_length": 5', "not JSON"),
        ('{"timestamp": 0, "input_length": 5}', "not an object with timestamp, input_length, output_length"),
        ('{"timestamp": null, "input_length": 5, "output_length": 5}', "timestamp is None"),
        ('{"timestamp": 0, "input_length": [5], "output_length": 5}', "input_length is [5]"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5}', "input_length is True"),
        ("[1, 2]", "not an object"),
    ],
)
def test_a_bad_mooncake_row_is_named_by_line_field_and_value(tmp_path: Path, row: str, said: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 5}'
    path = write(tmp_path, f"{good}\n{row}\n", "trace.jsonl")
    with pytest.raises(Invalid, match="line 2: ") as caught:
        read_trace(path)
    assert said in caught.value.message


def test_an_unknown_head_is_told_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"known trace; give one of azure: .*burstgpt: .*mooncake: "):
        read_trace(write(tmp_path, "time,prompt,answer\n1,2,3\n"))


def test_columns_that_a_named_format_lacks_are_told(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no column request tokens, response tokens"):
        read_trace(write(tmp_path, AZURE), "burstgpt")


def test_a_missing_an_empty_and_a_compressed_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such trace file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(Invalid, match="no requests in it"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(Invalid, match="no requests in it"):
        read_trace(write(tmp_path, AZURE))
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(Invalid, match="not UTF-8"):
        read_trace(packed)


def test_a_synthetic_trace_has_the_rate_and_the_spread_asked_for() -> None:
    for cv in (0.5, 1.0, 3.0):
        gaps = np.diff([a.time_s for a in synthetic(5.0, 4000.0, 100, 50, cv=cv, seed=3)])
        assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.08)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_a_synthetic_trace_is_the_same_for_the_same_seed_only() -> None:
    assert synthetic(2.0, 50.0, 100, 50, seed=1) == synthetic(2.0, 50.0, 100, 50, seed=1)
    assert synthetic(2.0, 50.0, 100, 50, seed=1) != synthetic(2.0, 50.0, 100, 50, seed=2)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_synthetic_trace_without_a_positive_rate_is_refused(bad: float) -> None:
    with pytest.raises(Invalid, match=r"rate is .*above zero"):
        synthetic(bad, 10.0, 10, 10)


TRACES = st.lists(st.builds(Arrival, st.floats(0, 100), st.integers(1, 100), st.integers(1, 100)), max_size=30).map(
    sorted
)


@given(TRACES, st.floats(0, 50), st.floats(0.1, 60))
def test_adjoining_cuts_hold_each_request_once(trace: list[Arrival], start: float, length: float) -> None:
    end = start + length
    parts = [a.input_tokens for s, d in ((0.0, start), (start, length), (end, 1000.0)) for a in cut(trace, s, d)]
    assert parts == [a.input_tokens for a in trace]


@given(TRACES, st.integers(2, 200))
def test_what_is_within_a_limit_and_what_is_not_make_the_whole(trace: list[Arrival], limit: int) -> None:
    kept = within(trace, limit)
    assert all(a.input_tokens + a.output_tokens <= limit for a in kept)
    assert len(kept) + sum(a.input_tokens + a.output_tokens > limit for a in trace) == len(trace)


def test_thinning_keeps_the_share_asked_for() -> None:
    trace = synthetic(10.0, 30.0, 10, 10)
    assert len(thinned(trace, 4)) == -(-len(trace) // 4)
    with pytest.raises(Invalid, match="every is 0"):
        thinned(trace, 0)
