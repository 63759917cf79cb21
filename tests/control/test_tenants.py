"""Whose a job is goes with it: to the engine, and to the adapter that it makes."""

from __future__ import annotations

from pathlib import Path

from core.api.schemas import JobCreate
from core.control import adapters, jobs
from core.control.context import Control
from core.control.principal import itself
from core.link.messages import StartJob
from tests.control import files
from tests.control.peer import EnginePeer
from tests.stack import until


def test_the_engine_is_told_whose_job_it_is_and_its_adapter_is_the_tenants(
    control: Control, engine: EnginePeer, tmp_path: Path
) -> None:
    mine, other = control.of(itself("acme")), control.of(itself("rival"))
    dataset = files.stored_dataset(mine, tmp_path)
    body = JobCreate(dataset=dataset.name, adapter_name="sailor", deploy=False)
    job = jobs.submit(mine, body, None)[0]
    order = engine.expect(StartJob)
    assert order.spec.tenant == "acme"
    folder = files.adapter(tmp_path / "made")
    engine.update(job.id, order.token, "succeeded", step=3, path=str(folder))
    until(lambda: jobs.get(mine, job.id).state == "succeeded", what="the job's end")
    assert adapters.get(mine, "sailor").tenant == "acme"
    assert adapters.page(other, 10, None).items == []
    assert jobs.page(other, 10, None, None).items == []


def test_a_queue_tells_nothing_of_another_tenants_jobs_but_their_number(
    control: Control, engine: EnginePeer, tmp_path: Path
) -> None:
    mine, other = control.of(itself("acme")), control.of(itself("rival"))
    files.stored_dataset(mine, tmp_path)
    files.stored_dataset(other, tmp_path)
    secret = jobs.submit(mine, JobCreate(dataset="rivers", adapter_name="secret", name="Secret plan"), None)[0]
    engine.expect(StartJob)
    waiting = jobs.submit(other, JobCreate(dataset="rivers", adapter_name="open"), None)[0]
    reason = jobs.get(other, waiting.id).waiting_reason
    assert reason is not None
    assert "another tenant" in reason
    assert "Secret" not in reason
    assert secret.id not in reason
