"""Facts about `harli simulate` and `harli whatif`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from core.errors import HarliError, Invalid, NotFound
from core.simulate import cli
from core.simulate.command import Load, machine, simulate, whatif
from core.simulate.measure import profile_device
from core.simulate.report import page
from core.workload.traces import synthetic

TRACE = synthetic(3.0, 20.0, 600, 80, seed=5)


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "azure.csv"
    rows = [f"2023-11-16 18:15:{a.time_s:09.6f},{a.input_tokens},{a.output_tokens}" for a in TRACE]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def invoke(*arguments: str) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    app.command()(cli.simulate)
    app.command()(cli.whatif)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.exception


def test_a_report_has_a_row_per_policy_and_target() -> None:
    report, last = simulate(TRACE, "h200", ("solo", "tasklet_slices"), (9.0, 30.0))
    assert [(row.policy, row.target_ms) for row in report.rows] == [
        ("solo", 9.0), ("solo", 30.0), ("tasklet_slices", 9.0), ("tasklet_slices", 30.0)
    ]  # fmt: skip
    solo, slices = report.rows[0].summary, report.rows[3].summary
    assert solo.finetune_tokens_s == 0
    assert 0 < slices.finetune_tokens_s < slices.exclusive_tokens_s
    assert slices.attainment >= 0.99
    assert last.summary() == slices
    json.dumps(report.to_json())


def test_without_targets_they_are_multiples_of_solos_p99() -> None:
    report, _ = simulate(TRACE, "h200", ("solo",))
    p99 = report.rows[0].summary.itl_p99_ms
    assert [row.target_ms / p99 for row in report.rows] == pytest.approx([1.5, 2, 4], rel=1e-3)


def test_the_same_seed_gives_the_same_report() -> None:
    first, second = (simulate(TRACE, "h200", ("tasklet_slices",), (15.0,), seed=3)[0].rows for _ in range(2))
    assert first == second


def test_a_target_under_the_floor_is_told_and_decode_stays_as_it_is() -> None:
    report, _ = simulate(TRACE, "h200", ("solo", "tasklet_slices"), (3.0,))
    assert any("3 ms is under the solo step's median" in note for note in report.notes)
    solo, slices = (row.summary for row in report.rows)
    assert slices.itl_p50_ms == pytest.approx(solo.itl_p50_ms, rel=0.02)


def test_requests_that_do_not_fit_are_counted_in_a_note() -> None:
    report, _ = simulate(TRACE, "h200", ("solo",), (9.0,), max_tokens=700)
    assert any(note.startswith(f"{len(TRACE) - report.requests} of {len(TRACE)} requests") for note in report.notes)


def test_faults_name_what_there_is() -> None:
    with pytest.raises(NotFound, match=r"best: no such policy; there are solo, .*tasklet_slices"):
        simulate(TRACE, "h200", ("best",))
    with pytest.raises(NotFound, match="b100: no such device"):
        simulate(TRACE, "b100", ("solo",))
    with pytest.raises(Invalid, match="no requests from 500"):
        simulate(TRACE, "h200", ("solo",), start_s=500.0, seconds=10.0)


def test_a_profile_that_harli_wrote_is_a_device_and_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_device(machine("h200").device).model_dump_json(exclude_defaults=True))
    report, _ = simulate(TRACE, str(path), ("tasklet_slices",), (15.0,))
    measured, shipped = report.rows[0].summary, simulate(TRACE, "h200", ("tasklet_slices",), (15.0,))[0].rows[0].summary
    assert measured.finetune_tokens_s == pytest.approx(shipped.finetune_tokens_s, rel=0.1)
    assert any("was measured on NVIDIA H200" in note and "those are the NVIDIA H200's" in note for note in report.notes)


# ---- what if ---------------------------------------------------------------------------------------------------------


def test_a_looser_target_never_gives_much_less() -> None:
    frontier = whatif(Load(32, 32 * 1024), "h200", (8, 12, 18, 27, 40), policy_name="tasklet_slices", now_ms=12.0)
    tokens = [point.finetune_tokens_s for point in frontier.points]
    assert all(later > 0.95 * earlier for earlier, later in pairwise(tokens))
    assert tokens[-1] > 3 * tokens[0]
    assert frontier.now is not None
    assert frontier.now == frontier.points[1]
    assert frontier.solo_ms == pytest.approx(6.36, rel=0.01)
    assert frontier.exclusive_tokens_s == pytest.approx(15_765, rel=0.01)


def test_with_nothing_to_decode_all_of_the_device_is_left() -> None:
    frontier = whatif(Load(0, 0), "h200", (10.0,), policy_name="tasklet_slices")
    assert frontier.points[0].exclusive_share == pytest.approx(1.0, abs=0.02)
    assert frontier.points[0].itl_p50_ms is frontier.points[0].itl_p99_ms is None


def test_targets_under_the_solo_step_are_told() -> None:
    frontier = whatif(Load(128, 128 * 1024), "h200", (5.0, 60.0), policy_name="tasklet_slices")
    assert any("targets up to 5 ms are under the solo step's 10.1" in note for note in frontier.notes)
    assert frontier.points[0].finetune_tokens_s == 0


@pytest.mark.parametrize("load", [Load(300, 300_000), Load(-1, 0), Load(8, 3), Load(8, 10**9)])
def test_a_load_that_the_device_cannot_hold_is_refused(load: Load) -> None:
    with pytest.raises(Invalid, match=r"load: .* KV tokens with so many"):
        whatif(load, "h200", (10.0,), policy_name="tasklet_slices")


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_simulate_prints_a_table_and_writes_a_page_that_needs_nothing_else(azure: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    status, out, _ = invoke(
        "simulate", str(azure), "--policy", "solo", "--policy", "tasklet_slices", "--target", "15", "--html", str(html)
    )
    assert status == 0
    assert "tasklet_slices" in out
    assert "azure.csv on NVIDIA H200" in out
    text = html.read_text()
    assert "Plotly.newPlot" in text
    assert text.count("src=") == 0 or "http" not in "".join(text.split("src=")[1:])[:200]


def test_simulate_prints_json(azure: Path) -> None:
    status, out, _ = invoke("simulate", str(azure), "--policy", "solo", "--target", "15", "--json")
    assert status == 0
    assert json.loads(out)["rows"][0]["summary"]["finished"] > 0


def test_a_bad_trace_fails_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,12,many\n")
    status, _, error = invoke("simulate", str(path))
    assert status != 0
    assert isinstance(error, HarliError)
    assert "bad.csv, line 2: generatedtokens is 'many'" in error.message


def test_whatif_prints_the_range_and_marks_the_present_target() -> None:
    status, out, _ = invoke("whatif", "--policy", "tasklet_slices", "--target", "8..60", "--now", "12")
    assert status == 0
    assert "now 12" in out
    assert "solo step 6.3" in out


def test_ranges_of_targets_are_read() -> None:
    assert cli.targets_of("12") == [12.0]
    assert (len(cli.targets_of("8..60")), cli.targets_of("8..60")[0], cli.targets_of("8..60")[-1]) == (13, 8.0, 60.0)


@pytest.mark.parametrize("text", ["0", "-3", "sixty", "60..8", "8..", "1..2..3", "8..inf", "nan"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"--target is .*give ms such as 12"):
        cli.targets_of(text)


def test_the_page_names_trace_device_and_notes() -> None:
    report, last = simulate(TRACE, "h200", ("solo",), (3.0,))
    text = page(report, last, report.rows[-1])
    assert "synthetic on NVIDIA H200" in text
    assert "is under the solo step" in text
