"""The command `harli` does what the API offers, prints JSON for programs, and names every fault without a traceback."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from core.cli import app
from core.client import Client
from core.config import Settings
from tests.stack import free_ports, until

Harli = Callable[..., Result]


def invoker(port: int, data_dir: Path, token: str = "") -> Harli:
    def harli(*arguments: str, stdin: str | None = None) -> Result:
        env = {"HARLI_API_PORT": str(port), "HARLI_DATA_DIR": str(data_dir), "COLUMNS": "200"}
        if token:
            env["HARLI_TOKEN"] = token
        return CliRunner().invoke(app, arguments, env=env, input=stdin)

    return harli


@pytest.fixture
def harli(api_settings: Settings, tmp_path: Path) -> Harli:
    """The command against an API without an engine."""
    return invoker(api_settings.api_port, tmp_path, api_settings.token_file.read_text().strip())


@pytest.fixture
def alone(tmp_path: Path) -> Harli:
    """The command where no API answers."""
    return invoker(free_ports(1)[0], tmp_path)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A small data set of a name and content of its own."""
    tag = uuid4().hex[:8]
    path = tmp_path / f"rows-{tag}.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{tag} {n}?", "completion": f"Aye, {n}."}) + "\n" for n in range(12))
    )
    return path


@pytest.fixture
def dataset(harli: Harli, rows: Path) -> str:
    assert harli("datasets", "upload", str(rows)).exit_code == 0
    return rows.stem


@pytest.fixture
def job(harli: Harli, api: Client, dataset: str) -> Iterator[str]:
    """A queued job."""
    submitted = answer(harli("submit", "--dataset", dataset, "--adapter", f"a-{uuid4().hex[:8]}", "--json"))
    yield submitted["id"]
    if api.job(submitted["id"]).state not in ("cancelled", "succeeded", "failed"):
        api.stop_job(submitted["id"])


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fault(result: Result, status: int = 1) -> str:
    """The error that was printed; nothing else may have been."""
    assert result.exit_code == status
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr.strip()


def first_words(result: Result) -> list[str]:
    return [line.split()[0] for line in result.stdout.splitlines()]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_without_an_api_it_says_where_it_looked_and_what_to_do(alone: Harli) -> None:
    said = fault(alone("jobs", "list"))
    assert said.startswith("error: ")
    assert said.endswith("[api_unreachable]")
    assert "harli up" in said


def test_a_program_that_is_not_harli_is_told_apart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.close()
        assert "127.0.0.1" in fault(invoker(free_ports(1)[0], tmp_path)("targets", "show"))


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    env = {"HARLI_API_PORT": "many", "HARLI_ENGINE__MAX_RUNNING_REQUESTS": "0"}
    said = fault(CliRunner().invoke(app, ["jobs", "list"], env=env))
    assert "HARLI_API_PORT" in said
    assert "'many'" in said
    assert "HARLI_ENGINE__MAX_RUNNING_REQUESTS" in said


@pytest.mark.parametrize(("text", "word"), [("host = ", "harli.toml"), ("hots = '::1'", "HOTS")])
def test_a_wrong_settings_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str) -> None:
    (tmp_path / "harli.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    said = fault(CliRunner().invoke(app, ["jobs", "list"]))
    assert word in said
    assert "harli.toml" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs", "show", "nobody"),
        ("jobs", "pause", "nobody"),
        ("jobs", "resume", "nobody"),
        ("jobs", "stop", "nobody"),
        ("jobs", "watch", "nobody"),
        ("datasets", "show", "nobody"),
        ("datasets", "delete", "nobody"),
        ("adapters", "deploy", "nobody"),
        ("adapters", "undeploy", "nobody"),
        ("adapters", "download", "nobody"),
        ("adapters", "delete", "nobody"),
        ("logs", "job-nobody"),
        ("submit", "--dataset", "nobody", "--adapter", "new"),
    ],
)
def test_what_does_not_exist_is_named(harli: Harli, arguments: tuple[str, ...]) -> None:
    assert "nobody" in fault(harli(*arguments))


@pytest.mark.parametrize("text", ["itl", "itl:60", "itl=fast", "itl=60@p99", "itl=-1", "itl=nan", "speed=60"])
def test_a_target_that_cannot_be_read_is_wrong_usage(harli: Harli, text: str) -> None:
    assert text in fault(harli("targets", "set", text), status=2)


@pytest.mark.parametrize("text", ["itl=0", "itl=60@1.5"])
def test_a_target_that_makes_no_sense_is_refused_and_nothing_changes(harli: Harli, text: str) -> None:
    before = answer(harli("targets", "show", "--json"))
    assert "target" in fault(harli("targets", "set", text))
    assert answer(harli("targets", "show", "--json")) == before


def test_a_log_of_neither_part_nor_job_is_wrong_usage(alone: Harli) -> None:
    assert "api, engine, console, demo" in fault(alone("logs", "enigne"), status=2)


def test_a_folder_that_is_not_there_is_named(harli: Harli, dataset: str, tmp_path: Path) -> None:
    there = str(tmp_path / "away" / "adapter.zip")
    assert f"no folder {tmp_path / 'away'}" in fault(harli("adapters", "download", "nobody", "--to", there))
    (tmp_path / "secret.jsonl").mkdir()
    assert "secret.jsonl" in fault(harli("datasets", "upload", str(tmp_path / "secret.jsonl")))


def test_a_log_that_was_never_written_is_named(alone: Harli, tmp_path: Path) -> None:
    assert str(tmp_path / "logs" / "engine.log") in fault(alone("logs", "engine"))


# ---- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["jobs", "datasets", "adapters", "alerts", "tenants", "users"])
def test_listings_are_tables_for_people_and_arrays_for_programs(harli: Harli, job: str, group: str) -> None:
    listed = answer(harli(group, "list", "--json"))
    assert isinstance(listed, list)
    # Looked at again where something changed in between, as alerts do.
    until(lambda: answer(harli(group, "--json")) == answer(harli(group, "list", "--json")), pause_s=0.0)
    shown = harli(group, "list")
    assert shown.exit_code == 0
    assert first_words(shown) == first_words(harli(group)), "listing is what a bare group does"
    if group == "jobs":
        assert job in shown.stdout


def test_a_data_set_is_uploaded_shown_and_deleted(harli: Harli, rows: Path) -> None:
    sent = answer(harli("datasets", "upload", str(rows), "--json"))
    assert sent["name"] == rows.stem
    assert sent["report"]["rows"] == 12
    assert "12 of 12 read" in harli("datasets", "show", rows.stem).stdout
    assert "name_taken" in fault(harli("datasets", "upload", str(rows)))
    assert answer(harli("datasets", "upload", str(rows), "--new-version", "--json"))["version"] == 1, "the same rows"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    assert answer(harli("datasets", "upload", str(rows), "--new-version", "--json"))["version"] == 2
    assert harli("datasets", "delete", rows.stem).exit_code == 0
    assert rows.stem in fault(harli("datasets", "show", rows.stem))


def test_columns_of_other_names_can_be_given(harli: Harli, tmp_path: Path) -> None:
    path = tmp_path / f"odd-{uuid4().hex[:8]}.csv"
    path.write_text("frage,antwort\n" + "".join(f"{n}?,ja {n}\n" for n in range(5)))
    columns = ("--column", "prompt=frage", "--column", "completion=antwort")
    assert answer(harli("datasets", "upload", str(path), *columns, "--json"))["report"]["rows"] == 5
    assert "ROLE=COLUMN" in fault(harli("datasets", "upload", str(path), "--column", "frage"), status=2)


def test_a_job_is_submitted_with_what_was_given(harli: Harli, dataset: str) -> None:
    adapter = f"a-{uuid4().hex[:8]}"
    options = ("--rank", "4", "--modules", "q_proj,v_proj", "--lr", "0.002", "--max-steps", "7", "--no-deploy")
    submitted = answer(harli("submit", "--dataset", dataset, "--adapter", adapter, *options, "--json"))
    spec = submitted["spec"]
    assert submitted["state"] == "queued"
    assert (spec["lora"]["rank"], spec["lora"]["target_modules"]) == (4, ["q_proj", "v_proj"])
    assert (spec["learning_rate"], spec["max_steps"], spec["deploy"]) == (0.002, 7, False)
    assert answer(harli("jobs", "stop", submitted["id"], "--json"))["state"] == "cancelled"
    assert "cancelled" in harli("jobs", "show", submitted["id"]).stdout


def test_a_file_is_uploaded_once_however_often_it_is_submitted(harli: Harli, rows: Path) -> None:
    options = ("--dataset", str(rows), "--json")
    first = answer(harli("submit", *options, "--adapter", f"a-{uuid4().hex[:8]}"))
    again = answer(harli("submit", *options, "--adapter", f"a-{uuid4().hex[:8]}"))
    assert first["dataset_id"] == again["dataset_id"]
    for submitted in (first, again):
        harli("jobs", "stop", submitted["id"])


def test_the_same_key_submits_once(harli: Harli, dataset: str) -> None:
    options = ("--dataset", dataset, "--adapter", f"a-{uuid4().hex[:8]}", "--key", uuid4().hex, "--json")
    first, second = answer(harli("submit", *options)), answer(harli("submit", *options))
    assert first["id"] == second["id"]
    harli("jobs", "stop", first["id"])


def test_jobs_are_listed_by_state(harli: Harli, job: str) -> None:
    assert job in [listed["id"] for listed in answer(harli("jobs", "list", "--state", "queued", "--json"))]
    assert answer(harli("jobs", "list", "--state", "running", "--json")) == []
    assert "queued" in fault(harli("jobs", "list", "--state", "asleep"), status=2)


def test_a_file_is_looked_at_before_it_is_sent(harli: Harli, api: Client, tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("frage,reaktion\nWer?,Ich.\n")
    looked = harli("datasets", "preview", str(path))
    assert (looked.exit_code, "--column ROLE=COLUMN" in looked.stdout) == (1, True)
    columns = ("--column", "prompt=frage", "--column", "completion=reaktion")
    found = answer(harli("datasets", "preview", str(path), *columns, "--json"))
    assert (found["format"], len(found["rows"])) == ("prompt/completion", 1)
    assert "odd" not in [dataset.name for dataset in api.datasets().items]
    path.write_text("frage,reaktion\n" + "Wer?,Ich.\n" * 3)
    remarks = harli("datasets", "preview", str(path), *columns)
    assert (remarks.exit_code, "remark of 3 rows 2:" in remarks.stdout) == (0, True), remarks.stdout


def test_rows_are_shown(harli: Harli, dataset: str) -> None:
    shown = harli("datasets", "rows", dataset, "--offset", "3", "--limit", "1").stdout
    assert shown.splitlines()[0] == "--- row 3"
    assert "assistant: Aye, 3." in shown


def test_a_terminal_obeys_nothing_that_others_wrote(harli: Harli, api: Client, dataset: str, tmp_path: Path) -> None:
    obeyed = "\x1b]0;mine\x07 \x9b31m \u202e\r"
    job = api.submit_job(dataset=dataset, adapter_name="obedient", name=f"a{obeyed}b")
    try:
        shown = harli("jobs", "list").stdout + harli("jobs", "show", job.id).stdout
    finally:
        api.stop_job(job.id, save=False)
    assert r"a\x1b]0;mine\x07 \x9b31m \u202e\rb" in shown
    path = tmp_path / "rows\x1b[31m.jsonl"
    path.write_text(json.dumps({"prompt": f"a{obeyed}b", "completion": "c"}) + "\n")
    harli("datasets", "upload", str(path), "--name", "obedient")
    shown += harli("datasets", "rows", "obedient").stdout
    path.write_text("neither\n")
    shown += fault(harli("datasets", "upload", str(path), "--name", "other"))
    assert r"rows\x1b[31m.jsonl" in shown and shown.count("mine") == 3
    assert not set("\x1b\x07\x9b\u202e\r") & set(shown)


def test_aliases_of_an_adapter_that_is_not_there_are_named(harli: Harli) -> None:
    for command in ("show nobody", "promote nobody prod", "rollback nobody prod", "merge both nobody no@1"):
        assert "there is no adapter nobody" in fault(harli("adapters", *command.split()))
    assert "ADAPTER=WEIGHT" in harli("adapters", "merge", "both", "a=x", "b").output


def test_watching_a_job_that_was_cancelled_ends_with_a_status(harli: Harli, job: str) -> None:
    harli("jobs", "stop", job)
    watched = harli("jobs", "watch", job)
    assert watched.exit_code == 1
    assert "cancelled" in watched.stderr


def test_targets_are_replaced_under_their_version(harli: Harli) -> None:
    found = answer(harli("targets", "set", "itl=60", "ttft=2000@0.95", "--json"))
    assert [(t["kind"], t["ms"], t["quantile"]) for t in found["targets"]] == [("itl", 60, 0.99), ("ttft", 2000, 0.95)]
    shown = harli("targets", "show").stdout
    assert "p95" in shown
    assert "2000" in shown
    fault(harli("targets", "set", "itl=70", "--version", str(found["version"] - 1)))
    assert answer(harli("targets", "show", "--json")) == found


def test_the_log_of_a_part_is_shown(alone: Harli, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "api.log").write_text("\n".join(f"line {n}" for n in range(100)))
    assert alone("logs", "api", "-n", "2").stdout.split("\n")[:2] == ["line 98", "line 99"]


def test_every_command_explains_itself(alone: Harli) -> None:
    commands = [
        ("up",), ("serve",), ("doctor",), ("logs",), ("submit",), ("chat",), ("jobs", "watch"), ("targets", "set"),
        ("datasets", "upload"), ("adapters", "download"),
    ]  # fmt: skip
    for command in commands:
        assert "Usage: " in alone(*command, "--help").stdout
    assert "Commands:" in alone().output


def test_targets_of_tenants_and_by_the_week_are_set_and_told_with_their_reason(harli: Harli, api: Client) -> None:
    before = api.targets().targets
    try:
        wanted = ("itl=60", "default/itl=40", "itl=150 mon-sun 00:00-00:00 Europe/Berlin")
        stored = answer(harli("targets", "set", *wanted, "--json"))
        assert [(one["tenant"], one["ms"]) for one in stored["in_force"]] == [(None, 150.0), ("default", 40.0)]
        told = harli("targets", "show").stdout
        assert "every day all day Europe/Berlin" in told
        assert "In force now:" in told
        assert "write itl=60" in harli("targets", "set", "itl=soon").output
        assert "zone" in fault(harli("targets", "set", "itl=60 Europe/Atlantis"))
    finally:
        api.set_targets(before)


def test_alerts_are_listed_and_rules_made_and_deleted(harli: Harli) -> None:
    made = answer(harli("alerts", "set", "slow", "itl_p99_ms", "above", "80", "--for", "120", "--json"))
    assert (made["name"], made["threshold"], made["for_s"]) == ("slow", 80.0, 120.0)
    assert "itl_p99_ms" in harli("alerts", "rules").stdout
    assert harli("alerts", "delete", "slow").exit_code == 0
    assert "alert_rule_not_found" in fault(harli("alerts", "delete", "slow"))
    assert harli("alerts", "set", "x", "mood", "above", "1").exit_code == 2
    assert isinstance(answer(harli("alerts", "list", "--all", "--json")), list)


def test_without_an_engine_there_is_no_frontier_and_it_is_said_why(harli: Harli) -> None:
    assert "No frontier: no engine is connected." in harli("targets", "frontier").stdout
    assert answer(harli("notices", "--code", "guard", "--json")) == []
