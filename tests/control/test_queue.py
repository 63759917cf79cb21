"""The order of waiting jobs, forgetting jobs, quotas, and the reasons that are given for all of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from core.api import schemas
from core.api.job_schemas import JobOutlook, QuotaUpdate
from core.api.tenant_schemas import TenantCreate
from core.control import comparison, datasets, jobs, outlook, progress, queue, quotas, retention, tenants
from core.control.context import Control
from core.control.principal import Principal
from core.errors import Conflict, Forbidden, Invalid, NotFound
from core.link.messages import JobUpdate, PauseJob, StartJob
from db import jobs as rows
from db.base import now
from db.jobs import JobRecord
from tests.control import files
from tests.control.peer import EnginePeer
from tests.control.test_dispatcher import reaches
from tests.stack import until

Submit = Callable[..., schemas.Job]
ADMIN = Principal("root", "default", "admin", frozenset({"admin"}))


def order(control: Control) -> list[str]:
    with control.store.read() as session:
        return [job.adapter_name for job in rows.in_states(session, ("queued",))]


def set_(control: Control, job_id: str, **fields: object) -> None:
    with control.store.write() as session:
        job = rows.find(session, job_id)
        assert job is not None
        for name, value in fields.items():
            setattr(job, name, value)


# ---- moving ----------------------------------------------------------------------------------------------------------


def test_a_waiting_job_moves_among_the_others(control: Control, submit: Submit) -> None:
    made = {name: submit(name).id for name in "abcd"}
    for name, to, expected in (
        ("c", "up", "acbd"), ("d", "top", "dacb"), ("d", "up", "dacb"), ("a", "down", "dcab"), ("d", "bottom", "cabd"),
    ):  # fmt: skip
        queue.move(control, made[name], to)  # type: ignore[arg-type]
        assert "".join(order(control)) == expected
    assert [job.adapter_name for job in queue.order(control, 3)] == list("cab")
    assert "moved" in [event.kind for event in jobs.events(control, made["d"], 0, 100)]


def test_priorities_stay_with_the_places(control: Control, submit: Submit) -> None:
    submit("high", priority=5)
    low = submit("low")
    queue.move(control, low.id, "top")
    assert order(control) == ["low", "high"]
    assert jobs.get(control, low.id).priority == 5
    submit("middle", priority=3)
    assert order(control) == ["low", "middle", "high"]


def test_a_job_that_runs_or_has_ended_has_no_place(control: Control, submit: Submit) -> None:
    job = submit()
    jobs.stop(control, job.id, save=False)
    with pytest.raises(Conflict, match="cancelled"):
        queue.move(control, job.id, "up")


# ---- forgetting ------------------------------------------------------------------------------------------------------


def test_deleting_an_ended_job_leaves_every_other_one_alone(control: Control, submit: Submit) -> None:
    ended, other = submit("ended"), submit("other")
    for job in (ended, other):
        (control.job_folder(job.id) / "checkpoints").mkdir(parents=True)
    with pytest.raises(Conflict, match="queued"):
        jobs.delete(control, ended.id)
    jobs.stop(control, ended.id, save=False)
    jobs.delete(control, ended.id)
    with pytest.raises(NotFound):
        jobs.get(control, ended.id)
    assert not control.job_folder(ended.id).exists()
    assert jobs.get(control, other.id).state == "queued" and control.job_folder(other.id).is_dir()
    assert jobs.events(control, other.id, 0, 10)


def test_old_jobs_are_forgotten_where_the_settings_say_so(control: Control, submit: Submit) -> None:
    old, fresh = submit("old"), submit("fresh")
    for job in (old, fresh):
        jobs.stop(control, job.id, save=False)
    set_(control, old.id, ended_at=now() - timedelta(days=40))
    retention.forget_old_jobs(control)
    assert jobs.get(control, old.id)
    control.settings.job_retention_days = 30
    retention.forget_old_jobs(control)
    assert [job.id for job in jobs.page(control, 10, None, None).items] == [fresh.id]


# ---- quotas ----------------------------------------------------------------------------------------------------------


def limit(control: Control, **limits: int) -> None:
    quotas.put(control.of(ADMIN), "default", QuotaUpdate(**limits))


def test_a_full_queue_takes_no_further_job(control: Control, submit: Submit) -> None:
    limit(control, waiting_jobs=1)
    submit("one")
    with pytest.raises(Conflict, match="may have 1") as caught:
        submit("two")
    assert caught.value.code == "quota_waiting_jobs"


def test_only_the_platforms_admins_set_quotas(control: Control) -> None:
    admin, operator = Principal("a", "acme", "admin", frozenset()), Principal("o", "default", "operator", frozenset())
    for who in (admin, operator):
        with pytest.raises(Forbidden):
            quotas.put(control.of(who), "default", QuotaUpdate())
    with pytest.raises(NotFound):
        quotas.get(control.of(Principal("a", "acme", "admin", frozenset())), "default")
    assert quotas.get(control, "default").finetune_tokens_day is None


def test_a_tenant_gives_its_jobs_no_priority_beyond_its_quota(control: Control, submit: Submit, tmp_path: Path) -> None:
    admin = control.of(ADMIN)
    tenants.create(admin, TenantCreate(name="acme"))
    acme = control.of(Principal("o", "acme", "operator", frozenset()))
    source = files.jsonl(tmp_path / "rows.jsonl")
    datasets.store(acme, source, source.name, "0", "rows", None, False)
    wish = schemas.JobCreate(dataset="rows", adapter_name="acme-1", priority=1)
    assert (quotas.get(admin, "acme").max_priority, quotas.get(admin, "default").max_priority) == (0, 100)
    for refused in (lambda: jobs.submit(acme, wish, None), lambda: jobs.estimate(acme, wish)):
        with pytest.raises(Invalid, match=r"priority is 1 and tenant acme .* up to 0.*acme --max-priority 1") as caught:
            refused()
        assert (caught.value.code, caught.value.param) == ("priority_too_high", "priority")
    job, _ = jobs.submit(acme, wish.model_copy(update={"priority": 0}), None)
    with pytest.raises(Invalid, match="up to 0"):
        jobs.update(acme, job.id, schemas.JobPatch(priority=1))
    assert jobs.update(admin, job.id, schemas.JobPatch(priority=9)).priority == 9, "the platform's admins may"
    assert jobs.update(acme, job.id, schemas.JobPatch(priority=5)).priority == 5, "lowering is free"
    quotas.put(admin, "acme", QuotaUpdate(max_priority=7))
    assert jobs.update(acme, job.id, schemas.JobPatch(priority=7)).priority == 7
    assert submit("ours", priority=100).priority == 100


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> float:
    """The day whose tokens count stays the same one: seconds since the epoch at its noon."""
    moment = datetime(2026, 3, 10, 12, tzinfo=UTC)
    monkeypatch.setattr(quotas, "now", lambda: moment)
    return moment.timestamp()


def test_tokens_of_another_day_do_not_count(control: Control, submit: Submit, noon: float) -> None:
    job = submit()
    limit(control, finetune_tokens_day=1000)
    for day, tokens in ((-1, 5000), (0, 5200)):
        with control.store.write() as session:
            record = rows.watched(session, job.id)
            assert record is not None
            update = JobUpdate(
                engine_id="e", job_id=job.id, token=1, time=noon + day * 86400, kind="metric", step=1, tokens=tokens
            )
            progress.measured(session, record, [update])
    assert quotas.get(control, "default").tokens_today == 200
    assert "used up" not in (jobs.get(control, job.id).waiting_reason or "")


def test_a_job_stands_back_when_its_tenants_tokens_are_used_up_and_goes_on_by_itself(
    control: Control, engine: EnginePeer, running: tuple[schemas.Job, StartJob], submit: Submit, noon: float
) -> None:
    job, start = running
    limit(control, finetune_tokens_day=1000)
    engine.update(job.id, start.token, "metric", step=1, loss=2.0, tokens=600, time=noon)
    engine.update(job.id, start.token, "metric", step=2, loss=2.0, tokens=1200, time=noon)
    engine.expect(PauseJob)
    engine.update(job.id, start.token, "paused", step=2)
    held = reaches(control, job.id, "paused")
    assert "1,000 finetuning tokens of today are used up (1,200)" in (held.waiting_reason or "")
    waiting = submit("other")
    assert "used up" in (waiting.waiting_reason or "")
    engine.nothing(StartJob)
    assert quotas.get(control, "default").tokens_today == 1200
    found = outlook.of(control, job.id)
    assert "goes on by itself" in found.headline and "used up" in found.reasons[0]
    limit(control, finetune_tokens_day=5000)
    assert engine.expect(StartJob).spec.job_id == job.id


def test_steps_that_are_done_again_count_once(control: Control, submit: Submit, noon: float) -> None:
    job = submit()
    done = iter((100, 300, 150, 300, 350))
    for together in (2, 1, 2):
        updates = [
            JobUpdate(engine_id="e", job_id=job.id, token=1, time=noon, kind="metric", step=1, tokens=next(done))
            for _ in range(together)
        ]
        with control.store.write() as session:
            record = rows.watched(session, job.id)
            assert record is not None
            progress.measured(session, record, updates)
    assert quotas.get(control, "default").tokens_today == 350


# ---- why -------------------------------------------------------------------------------------------------------------


def test_a_waiting_job_says_who_is_before_it_and_when_it_ends(control: Control, submit: Submit) -> None:
    first, second = submit("first"), submit("second")
    found = outlook.of(control, second.id)
    assert (found.headline, found.position) == ("no engine is connected", 2)
    assert [ahead.id for ahead in found.ahead] == [first.id]
    assert found.eta is None and any("no finetuning speed has been measured" in reason for reason in found.reasons)


def test_another_tenants_job_is_counted_and_not_shown(control: Control, submit: Submit) -> None:
    first, second = submit("first"), submit("second")
    set_(control, first.id, tenant="acme")
    own = control.of(Principal("o", "default", "operator", frozenset()))
    found = outlook.of(own, second.id)
    assert found.position == 2 and [(ahead.id, ahead.name) for ahead in found.ahead] == [(None, None)]
    with pytest.raises(NotFound):
        outlook.of(own, first.id)


def test_a_running_job_says_what_the_planner_and_the_guard_say(
    control: Control, engine: EnginePeer, running: tuple[schemas.Job, StartJob]
) -> None:
    job, _ = running
    reaches(control, job.id, "running")

    def told() -> JobOutlook | None:
        engine.telemetry(paused_reason="guard: four gaps over 40 ms")
        found = outlook.of(control, job.id)
        return found if "stands still" in found.headline else None

    assert until(told, what="the guard's reason", pause_s=0.3).reasons[0] == "guard: four gaps over 40 ms"


def test_a_deadline_that_will_not_be_kept_is_noted_once(control: Control, submit: Submit) -> None:
    job = submit(deadline=(now() + timedelta(hours=1)).isoformat())
    assert not outlook.of(control, job.id).late
    set_(control, job.id, deadline=now() - timedelta(minutes=1))
    for _ in range(2):
        with control.store.write() as session:
            outlook.warn_of_deadlines(session)
    assert outlook.of(control, job.id).late
    assert [event.kind for event in jobs.events(control, job.id, 0, 100)].count("deadline_at_risk") == 1
    jobs.update(control, job.id, schemas.JobPatch(deadline=now() + timedelta(hours=2)))
    assert not outlook.of(control, job.id).late


# ---- side by side ----------------------------------------------------------------------------------------------------


def test_jobs_are_compared_by_what_differs(control: Control, submit: Submit) -> None:
    made = [submit("a", learning_rate=1e-3, lora={"rank": 4}), submit("b", learning_rate=1e-4, lora={"rank": 4})]
    with control.store.write() as session:
        for number, job in enumerate(made):
            session.add_all(
                rows.JobMetricRecord(job_id=job.id, step=step, time=now(), loss=2.0 - number - step / 10)
                for step in range(1, 4)
            )
    found = comparison.compare(control, [job.id for job in made])
    assert found.differing == {"adapter_name": ["a", "b"], "learning_rate": [1e-3, 1e-4]}
    assert [len(found.metrics[job.id]) for job in made] == [3, 3]


def test_long_runs_are_thinned_but_for_what_was_evaluated() -> None:
    metrics = [
        rows.JobMetricRecord(job_id="j", step=n, loss=1.0, eval_loss=1.0 if n == 4321 else None) for n in range(5000)
    ]
    kept = comparison.thinned(metrics)
    assert len(kept) <= 1002 and {0, 4321, 4999} <= {row.step for row in kept}


def test_a_running_jobs_rest_is_by_steps_where_they_are_known() -> None:
    from core.control.estimates import tokens_left

    assert tokens_left(JobRecord(expected_tokens=1000, total_steps=4, step=1, tokens=10)) == 750
    assert tokens_left(JobRecord(expected_tokens=1000, total_steps=None, step=0, tokens=10)) == 990
    assert tokens_left(JobRecord(expected_tokens=None, total_steps=4, step=1, tokens=10)) is None
