"""Samples on the way: the evaluated adapter is loaded under a name of its own, asked, and let go of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.api import schemas
from core.control import jobs
from core.control.context import Control
from core.control.sampler import PREFIX, Sampler
from db import jobs as rows
from db import samples
from db.base import now
from db.engines import EngineRecord
from tests.control.peer import AdapterServer
from tests.control.test_submission import HELLO

Submit = Callable[..., schemas.Job]


@pytest.fixture
def store_url(sqlite_url: str) -> str:
    return sqlite_url


@pytest.fixture
def sampler(control: Control, adapter_server: AdapterServer) -> Sampler:
    hello = {**HELLO, "http_url": adapter_server.url}
    with control.store.write() as session:
        session.add(EngineRecord(id="e", state="ready", hello=hello, since=now(), state_since=now()))
    return Sampler(control, control.store.write)


def evaluated(control: Control, job_id: str, step: int) -> None:
    with control.store.write() as session:
        job = rows.find(session, job_id)
        assert job is not None
        job.sample_step, job.sample_path = step, f"folder-{step}"


def test_every_prompt_is_answered_by_the_adapter_of_the_step(
    control: Control, submit: Submit, sampler: Sampler, adapter_server: AdapterServer
) -> None:
    job = submit(sample_prompts=["Ahoy?", "Whither?"], sample_tokens=9)
    for step in (4, 8):
        evaluated(control, job.id, step)
        sampler.run()
    found = jobs.samples(control, job.id)
    assert [(s.step, s.number, s.answer, s.tokens) for s in found] == [
        (4, 0, "Ahoy? folder-4", 9), (4, 1, "Whither? folder-4", 9),
        (8, 0, "Ahoy? folder-8", 9), (8, 1, "Whither? folder-8", 9),
    ]  # fmt: skip
    assert adapter_server.loaded == {}
    assert [event.kind for event in jobs.events(control, job.id, 0, 100)].count("samples") == 2
    calls = len(adapter_server.calls)
    sampler.run()
    assert len(adapter_server.calls) == calls, "nothing is left to ask"


def test_a_refusal_is_said_and_not_asked_again(
    control: Control, submit: Submit, sampler: Sampler, adapter_server: AdapterServer
) -> None:
    job = submit(sample_prompts=["Ahoy?"])
    evaluated(control, job.id, 4)
    adapter_server.refuse = "no memory for another adapter"
    sampler.run()
    assert "no memory for another adapter" in jobs.events(control, job.id, 0, 100)[-1].message
    calls = len(adapter_server.calls)
    sampler.run()
    assert len(adapter_server.calls) == calls and jobs.samples(control, job.id) == []


def test_an_engine_that_does_not_answer_is_asked_again(
    control: Control, submit: Submit, sampler: Sampler, adapter_server: AdapterServer
) -> None:
    job = submit(sample_prompts=["Ahoy?"])
    evaluated(control, job.id, 4)
    adapter_server.close()
    sampler.run()
    with control.store.read() as session:
        assert [waiting.id for waiting in rows.to_sample(session)] == [job.id]


def test_what_a_dispatcher_left_loaded_is_unloaded_and_customers_adapters_stay(
    control: Control, sampler: Sampler, adapter_server: AdapterServer
) -> None:
    adapter_server.loaded |= {f"{PREFIX}job-1": "old", "captain": "theirs"}
    sampler.run()
    assert adapter_server.loaded == {"captain": "theirs"}


def test_a_job_that_goes_back_forgets_what_it_said_later(control: Control, submit: Submit) -> None:
    job = submit(sample_prompts=["Ahoy?"])
    with control.store.write() as session:
        for step in (4, 8):
            record = samples.SampleRecord(job_id=job.id, step=step, number=0, time=now(), prompt="Ahoy?", answer="Aye")
            samples.put(session, [record])
        samples.drop_after(session, job.id, 4)
    assert [sample.step for sample in jobs.samples(control, job.id)] == [4]
