"""`harli` around jobs, against a real API: estimates, clones, the queue, schedules, webhooks, quotas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from core.cli_jobs import _changes
from tests.clock import far_off
from tests.test_cli import Harli, dataset, harli, rows  # noqa: F401


def shown(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_dry_run_says_what_a_job_would_take_and_queues_nothing(harli: Harli, dataset: str) -> None:  # noqa: F811
    command = ("submit", "--dataset", dataset, "--adapter", f"{dataset}-dry", "--preset", "thorough", "--dry-run")
    found = shown(harli(*command, "--json"))
    assert found["spec"]["patience"] == 3 and found["spec"]["keep_best"] and found["seconds"] is None
    assert any("not known" in note for note in found["notes"])
    assert "not known" in harli(*command).stdout
    assert not [job for job in shown(harli("jobs", "list", "--json")) if job["adapter_name"] == f"{dataset}-dry"]


def test_a_job_is_refused_before_it_waits(harli: Harli, dataset: str) -> None:  # noqa: F811
    refused = harli("submit", "--dataset", dataset, "--adapter", "x", "--patience", "2")
    assert refused.exit_code == 1 and "evaluate_every" in refused.output


def test_jobs_are_cloned_moved_explained_compared_and_forgotten(harli: Harli, dataset: str) -> None:  # noqa: F811
    names = [f"{dataset}-{letter}" for letter in "ab"]
    first, second = (shown(harli("submit", "--dataset", dataset, "--adapter", name, "--json"))["id"] for name in names)
    assert "number" in harli("jobs", "move", second, "top").stdout
    assert shown(harli("jobs", "queue", "--json"))[0]["id"] == second
    assert first in harli("jobs", "queue").stdout
    outlook = shown(harli("jobs", "why", second, "--json"))
    assert first not in [ahead["id"] for ahead in outlook["ahead"]]
    assert "no engine is connected" in harli("jobs", "why", first).stdout
    other = f"{dataset}-c"
    cloned = shown(harli("jobs", "clone", first, "--set", "lora.rank=4", "--set", f"adapter_name={other}", "--json"))
    assert (cloned["spec"]["lora"]["rank"], cloned["adapter_name"]) == (4, other)
    compared = shown(harli("compare", first, cloned["id"], "--json"))
    assert compared["differing"]["lora.rank"] == [8, 4]
    assert "lora.rank" in harli("compare", first, cloned["id"]).stdout
    assert "No samples" in harli("jobs", "samples", first).stdout
    for job in (first, second, cloned["id"]):
        harli("jobs", "stop", job)
    assert harli("jobs", "delete", first).exit_code == 0
    assert harli("jobs", "show", first).exit_code == 1


def test_names_that_look_like_markup_are_shown_as_they_are(harli: Harli, dataset: str) -> None:  # noqa: F811
    name = "[/b] [red]urgent"
    command = ("submit", "--dataset", dataset, "--name", name)
    ahead = shown(harli(*command, "--adapter", f"{dataset}-ahead", "--json"))["id"]
    behind = shown(harli(*command, "--adapter", f"{dataset}-behind", "--json"))["id"]
    assert harli("jobs", "why", behind).exit_code == 0
    assert harli("jobs", "move", behind, "top").exit_code == 0
    assert name in harli("jobs", "show", ahead).stdout
    assert name in harli("jobs", "queue").stdout
    for job in (ahead, behind):
        harli("jobs", "stop", job)


def test_one_job_cannot_be_compared(harli: Harli) -> None:  # noqa: F811
    refused = harli("compare", "job-1")
    assert refused.exit_code == 2 and "two to 12 jobs" in refused.output


def test_a_schedule_is_made_run_and_deleted(harli: Harli, dataset: str) -> None:  # noqa: F811
    command = ("schedules", "create", "nightly", "--cron", far_off(), "--dataset", dataset, "--adapter", dataset)
    made = shown(harli(*command, "--continued", "--set", "preset=quick", "--json"))
    assert made["continued"] and made["next_run_at"]
    ran = harli("schedules", "run", made["id"])
    assert "submitted job" in ran.stdout
    assert harli("schedules", "off", made["id"]).exit_code == 0
    assert [s["enabled"] for s in shown(harli("schedules", "--json")) if s["id"] == made["id"]] == [False]
    assert "nightly" in harli("schedules").stdout
    harli("jobs", "stop", ran.stdout.split()[-1].rstrip("."))
    assert harli("schedules", "delete", made["id"]).exit_code == 0


def test_a_webhook_is_made_tested_and_deleted(harli: Harli) -> None:  # noqa: F811
    made = shown(harli("webhooks", "create", "https://hooks.invalid/harli", "--event", "job.failed", "--json"))
    assert made["secret"].startswith("whsec_")
    assert harli("webhooks", "test", made["id"]).exit_code == 0
    (sent,) = shown(harli("webhooks", "deliveries", made["id"], "--json"))
    assert sent["event"] == "webhook.test"
    assert made["id"] in harli("webhooks").stdout and made["secret"] not in harli("webhooks", "--json").stdout
    assert harli("webhooks", "delete", made["id"]).exit_code == 0
    refused = harli("webhooks", "create", "https://127.0.0.1/")
    assert refused.exit_code == 1 and "webhook_url" in refused.output


def test_a_quota_is_set_shown_and_taken_away(harli: Harli) -> None:  # noqa: F811
    found = shown(harli("quota", "default", "--tokens-a-day", "1000", "--waiting", "500", "--json"))
    assert (found["finetune_tokens_day"], found["waiting_jobs"], found["running_jobs"]) == (1000, 500, None)
    assert "of 1,000" in harli("quota", "default").stdout
    assert shown(harli("quota", "default", "--max-priority", "3", "--json"))["max_priority"] == 3
    taken_away = shown(harli("quota", "default", "--none", "--json"))
    assert (taken_away["finetune_tokens_day"], taken_away["max_priority"]) == (None, 100)
    assert harli("quota", "atlantis").exit_code == 1


@pytest.mark.parametrize("given", ["lora.rank", "=4"])
def test_a_change_that_is_none_is_wrong_usage(harli: Harli, given: str, tmp_path: Path) -> None:  # noqa: F811
    assert harli("jobs", "clone", "job-1", "--set", given).exit_code == 2


def test_changes_are_json_or_text() -> None:
    given = ["lora.rank=4", "lora.use_rslora=true", "name=my job", 'sample_prompts=["Ahoy?"]']
    assert _changes(given) == {
        "lora": {"rank": 4, "use_rslora": True}, "name": "my job", "sample_prompts": ["Ahoy?"],
    }  # fmt: skip
