"""The demonstration: the sample job is submitted once and never again."""

from __future__ import annotations

from core.client import Client
from core.demo import NAME, submit_sample


def test_the_sample_job_is_submitted_once(api: Client) -> None:
    job = submit_sample(api)
    assert job is not None
    assert (job.dataset_name, job.adapter_name, job.state) == (NAME, NAME, "queued")
    assert submit_sample(api) is None
    api.stop_job(job.id)
    assert submit_sample(api) is None, "who stops it does not want it again"
    assert [listed.id for listed in api.jobs().items if listed.dataset_name == NAME] == [job.id]


def test_the_sample_data_set_has_no_faults(api: Client) -> None:
    submit_sample(api)
    report = api.dataset(NAME).report
    assert report.findings == []
    assert report.rows == report.rows_read > 200
