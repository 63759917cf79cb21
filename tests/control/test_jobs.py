"""Submitting, listing, and asking things of jobs that no engine holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from core.api import schemas
from core.control import adapters, jobs
from core.control.context import Control
from core.errors import Conflict, HarliError, Invalid, NotFound
from db.base import now
from db.engines import EngineRecord
from tests.control import files
from tests.control.peer import MODULES

Submit = Callable[..., schemas.Job]


def body(stored: schemas.Dataset, **fields: object) -> schemas.JobCreate:
    return schemas.JobCreate.model_validate({"dataset": stored.name, "adapter_name": "sailor", **fields})


@pytest.fixture
def known_engine(control: Control) -> None:
    """An engine was here, and what it can serve is known; it is not here now."""
    hello = {
        "model": "small",
        "model_path": "nowhere",
        "max_lora_rank": 16,
        "lora_modules": list(MODULES),
        "http_url": "http://127.0.0.1:1",
    }
    with control.store.write() as session:
        session.add(EngineRecord(id="e", state="lost", hello=hello, since=now(), state_since=now()))


# ---- submitting ------------------------------------------------------------------------------------------------------


def test_a_job_is_queued_with_every_default_filled_in(control: Control, submit: Submit) -> None:
    job = submit()
    assert (job.state, job.name, job.dataset_name) == ("queued", "sailor on rivers", "rivers")
    assert (job.spec.micro_batch_tokens, job.spec.sequence_length, job.spec.epochs) == (256, 256, 3.0)
    assert job.waiting_reason == "no engine is connected (number 1 in the queue)"
    assert jobs.get(control, job.id) == job


def test_a_listing_has_its_jobs_whole(control: Control, submit: Submit) -> None:
    deadline = (now() + timedelta(days=1)).isoformat()
    submitted = [submit(f"sailor-{number}", deadline=deadline, lora={"rank": 4}).id for number in range(3)]
    jobs.stop(control, submitted[0], False)
    jobs.pause(control, submitted[1])
    with control.store.write() as session:
        failed = jobs.require(session, submitted[0])
        failed.error = {"code": "x", "message": "for a reason", "param": None}
        failed.loss, failed.epoch = 1.5, 0.25
        older = jobs.require(session, submitted[1])
        older.spec = {name: value for name, value in older.spec.items() if name != "sample_tokens"}
    listed = jobs.page(control, 10, None, None)
    assert listed.items == [jobs.get(control, job) for job in reversed(submitted)]
    assert listed.next is None
    assert json.loads(jobs.page_json(control, 10, None, None)) == listed.model_dump(mode="json")
    assert listed.items[1].spec.sample_tokens == 64, "what an earlier version did not know has its default"
    assert listed.items[1].waiting_reason == "it is paused; resume it to put it back in the queue"
    first = jobs.page(control, 2, None, None)
    assert jobs.page(control, 2, first.next, None).items == listed.items[2:]


def test_steps_instead_of_epochs(submit: Submit) -> None:
    spec = submit(max_steps=5).spec
    assert (spec.epochs, spec.max_steps) == (None, 5)


def test_the_same_key_is_the_same_job(control: Control, dataset: schemas.Dataset) -> None:
    first, new = jobs.submit(control, body(dataset), "press-1")
    again, new_again = jobs.submit(control, body(dataset), "press-1")
    assert (new, new_again) == (True, False)
    assert again == first


def test_a_key_with_another_request_is_refused(control: Control, dataset: schemas.Dataset) -> None:
    jobs.submit(control, body(dataset), "press-1")
    with pytest.raises(Conflict, match="press-1") as caught:
        jobs.submit(control, body(dataset, seed=1), "press-1")
    assert caught.value.code == "idempotency_key_reused"


def test_a_double_press_at_the_same_moment_is_one_job(control: Control, dataset: schemas.Dataset) -> None:
    answers: list[tuple[schemas.Job, bool]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(jobs.submit(control, body(dataset), "press-1")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({job.id for job, _ in answers}) == 1
    assert sorted(new for _, new in answers) == [False] * 5 + [True]
    assert len(jobs.page(control, 10, None, None).items) == 1


@pytest.mark.parametrize(
    ("fields", "kind", "param", "said"),
    [
        ({"dataset": "lakes"}, NotFound, "dataset", "lakes"),
        ({"epochs": 1, "max_steps": 5}, Invalid, "max_steps", "5"),
        ({"micro_batch_tokens": 128, "sequence_length": 200}, Invalid, "sequence_length", "200"),
        ({"initial_adapter": "captain"}, NotFound, "initial_adapter", "captain"),
        ({"initial_adapter": "captain@x"}, Invalid, "initial_adapter", "captain@2"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name_and_nothing_is_stored(
    control: Control, dataset: schemas.Dataset, fields: dict[str, object], kind: type[HarliError], param: str, said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        jobs.submit(control, body(dataset, **fields), "key")
    assert caught.value.param == param
    assert jobs.page(control, 10, None, None).items == []
    assert jobs.submit(control, body(dataset), "key")[1], "a refused request uses no key up"


@pytest.mark.usefixtures("known_engine")
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"lora": {"rank": 17}}, "lora.rank", "17.*16"),
        ({"lora": {"target_modules": ["q_proj", "w_pack"]}}, "lora.target_modules", "w_pack"),
        ({"lora": {"target_modules": ["q_proj", "o_proj"]}}, "lora.target_modules", "q_proj without v_proj"),
        ({"adapter_name": "small"}, "adapter_name", "served model"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused(
    control: Control, dataset: schemas.Dataset, fields: dict[str, object], param: str, said: str
) -> None:
    with pytest.raises(HarliError, match=said) as caught:
        jobs.submit(control, body(dataset, **fields), None)
    assert caught.value.param == param


def test_two_open_jobs_do_not_write_one_adapter(control: Control, submit: Submit) -> None:
    first = submit()
    with pytest.raises(Conflict, match=first.id):
        submit()
    jobs.stop(control, first.id, save=False)
    assert submit().state == "queued", "once the first has ended the name is free again"


def test_a_job_may_start_from_an_adapter_and_takes_its_shape(control: Control, submit: Submit, tmp_path: Path) -> None:
    adapters.upload(control, files.adapter(tmp_path / "captain", rank=4), "captain", False)
    job = submit(initial_adapter="captain@1")
    assert (job.spec.lora.rank, sorted(job.spec.lora.target_modules)) == (4, ["q_proj", "v_proj"])
    with pytest.raises(Invalid, match=r"lora\.rank is 8") as caught:
        submit("mate", initial_adapter="captain", lora={"rank": 8})
    assert caught.value.param == "lora.rank"


def test_a_row_that_is_too_long_is_named_with_its_tokens(
    control: Control, tmp_path: Path, small_tokenizer: Path
) -> None:
    served = control.settings.model_copy(deep=True)
    served.engine.model = small_tokenizer
    with_model = Control(served, control.store)
    dataset = files.stored_dataset(with_model, tmp_path, "long", words=60)
    assert dataset.report.longest_row_tokens is not None
    with pytest.raises(Invalid, match=rf"long: .*{dataset.report.longest_row_tokens}") as caught:
        jobs.submit(with_model, body(dataset, micro_batch_tokens=32), None)
    assert caught.value.param in ("micro_batch_tokens", "sequence_length")
    fits = body(dataset, micro_batch_tokens=max(dataset.report.longest_row_tokens, 32))
    assert jobs.submit(with_model, fits, None)[1]


# ---- looking ---------------------------------------------------------------------------------------------------------


def test_pages_hold_every_job_once_newest_first(control: Control, submit: Submit) -> None:
    made = [submit(f"a{number}").id for number in range(7)]
    seen: list[str] = []
    cursor = None
    while True:
        page = jobs.page(control, 3, cursor, None)
        seen += [job.id for job in page.items]
        cursor = page.next
        if cursor is None:
            break
    assert seen == made[::-1]


def test_pages_of_one_state(control: Control, submit: Submit) -> None:
    one, two = submit("a"), submit("b")
    jobs.stop(control, one.id, save=False)
    assert [job.id for job in jobs.page(control, 10, None, "queued").items] == [two.id]


@pytest.mark.parametrize("cursor", ["%", "bm9wZQ", "é"])
def test_a_cursor_of_no_listing_is_refused(control: Control, cursor: str) -> None:
    with pytest.raises(Invalid, match="cursor"):
        jobs.page(control, 3, cursor, None)


def test_the_queue_says_who_is_before_whom(control: Control, submit: Submit) -> None:
    low, high = submit("low"), submit("high", priority=5)
    assert "number 1 in" in (jobs.get(control, high.id).waiting_reason or "")
    assert "number 2 in" in (jobs.get(control, low.id).waiting_reason or "")


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_a_job_that_waits_is_paused_resumed_and_stopped_without_an_engine(control: Control, submit: Submit) -> None:
    job = submit()
    assert jobs.pause(control, job.id).state == "paused"
    assert jobs.pause(control, job.id).state == "paused", "twice is once"
    assert jobs.resume(control, job.id).state == "queued"
    stopped = jobs.stop(control, job.id, save=False)
    assert stopped.state == "cancelled"
    assert stopped.ended_at is not None
    assert stopped.waiting_reason is None
    kinds = [event.kind for event in jobs.events(control, job.id, 0, 10)]
    assert kinds == ["submitted", "paused", "resumed", "cancelled"]


def test_what_a_state_forbids_is_a_conflict_that_names_it(control: Control, submit: Submit) -> None:
    job = submit()
    with pytest.raises(Conflict, match="is queued; it can be resumed while it is paused or interrupted"):
        jobs.resume(control, job.id)
    jobs.stop(control, job.id, save=False)
    for ask in (
        lambda: jobs.pause(control, job.id),
        lambda: jobs.resume(control, job.id),
        lambda: jobs.stop(control, job.id, save=False),
        lambda: jobs.stop(control, job.id, save=True),
        lambda: jobs.update(control, job.id, schemas.JobPatch(priority=3)),
    ):
        with pytest.raises(Conflict, match="cancelled"):
            ask()


def test_there_is_nothing_to_save_of_a_job_that_never_ran(control: Control, submit: Submit) -> None:
    job = submit()
    with pytest.raises(Conflict, match="nothing to save"):
        jobs.stop(control, job.id, save=True)
    assert jobs.get(control, job.id).state == "queued"


def test_priority_and_name_change_and_are_noted(control: Control, submit: Submit) -> None:
    job = submit()
    patched = jobs.update(control, job.id, schemas.JobPatch(priority=9, name="Ahab"))
    assert (patched.priority, patched.name) == (9, "Ahab")
    assert jobs.events(control, job.id, 0, 10)[-1].message == "priority 0 → 9"


@pytest.mark.parametrize(
    "ask",
    [
        lambda control: jobs.get(control, "job-none"),
        lambda control: jobs.pause(control, "job-none"),
        lambda control: jobs.resume(control, "job-none"),
        lambda control: jobs.stop(control, "job-none", False),
        lambda control: jobs.update(control, "job-none", schemas.JobPatch()),
        lambda control: jobs.events(control, "job-none", 0, 1),
        lambda control: jobs.metrics(control, "job-none", 0, 1),
        lambda control: jobs.log(control, "job-none", 0, 1),
    ],
)
def test_a_job_that_does_not_exist_is_not_found(control: Control, ask: Callable[[Control], object]) -> None:
    with pytest.raises(NotFound, match="job-none"):
        ask(control)


def test_specs_are_stored_as_plain_json(control: Control, submit: Submit) -> None:
    assert json.dumps(submit(lora={"dropout": 0.1}).spec.model_dump(mode="json"))
