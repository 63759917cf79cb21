"""Which transitions there are, and that each leaves its row in the same transaction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core.api import schemas
from core.control import jobs
from core.control.context import Control
from core.control.lifecycle import TRANSITIONS, transition
from core.errors import Conflict
from db import changes
from db import jobs as rows

Submit = Callable[..., schemas.Job]


def test_every_state_has_its_transitions_and_ended_ones_have_none() -> None:
    assert set(TRANSITIONS) == set(rows.STATES)
    assert all(TRANSITIONS[state] == frozenset() for state in rows.TERMINAL)
    assert all(target in rows.STATES for targets in TRANSITIONS.values() for target in targets)


def test_a_transition_is_one_event_and_one_notification(control: Control, submit: Submit) -> None:
    job_id = submit().id
    with control.store.write() as session:
        job = rows.find(session, job_id)
        assert job is not None
        job.token = 7
        transition(session, job, "starting", "starting", "off it goes")
    last = jobs.events(control, job_id, 0, 10)[-1]
    assert (last.kind, last.from_state, last.to_state) == ("starting", "queued", "starting")
    assert last.message == "off it goes"
    with control.store.read() as session:
        change = changes.after(session, 0, 1000)[-1]
        assert (change.topic, change.kind, change.ref) == ("jobs", "starting", job_id)
        assert change.data == {"state": "starting"}
        assert rows.events(session, job_id, 0, 10)[-1].token == 7


def test_an_event_is_not_kept_when_its_transition_is_rolled_back(control: Control, submit: Submit) -> None:
    job_id = submit().id
    with pytest.raises(RuntimeError), control.store.write() as session:
        job = rows.find(session, job_id)
        assert job is not None
        transition(session, job, "starting", "starting")
        raise RuntimeError
    assert jobs.get(control, job_id).state == "queued"
    assert [event.kind for event in jobs.events(control, job_id, 0, 10)] == ["submitted"]


@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(walk=st.lists(st.sampled_from(rows.STATES), max_size=12), number=st.integers(0, 2**60))
def test_whatever_is_tried_a_job_only_moves_along_the_table(
    control: Control, dataset: schemas.Dataset, walk: list[str], number: int
) -> None:
    body = schemas.JobCreate(dataset=dataset.id, adapter_name=f"a{number}")
    job_id = jobs.submit(control, body, None)[0].id
    for target in walk:
        before = jobs.get(control, job_id).state
        try:
            with control.store.write() as session:
                job = rows.find(session, job_id)
                assert job is not None
                transition(session, job, target, "tried")
        except Conflict as error:
            assert target not in TRANSITIONS[before]
            assert before in error.message
            assert jobs.get(control, job_id).state == before
        else:
            assert target in TRANSITIONS[before]
    ended = jobs.get(control, job_id)
    assert (ended.ended_at is not None) == (ended.state in rows.TERMINAL)
    path = [event.to_state for event in jobs.events(control, job_id, 0, 100)]
    assert path[-1] == ended.state
    with control.store.write() as session:
        session.delete(rows.find(session, job_id))
