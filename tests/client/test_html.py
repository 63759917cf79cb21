"""What a notebook shows of the API's bodies: pictures of the moment, every text escaped."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars
import pytest

from core.api import schemas
from core.client import Rows, frame, html, job_progress, upload_progress
from core.client.synchronous import Client

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def job(**fields: object) -> schemas.Job:
    spec = {"dataset": "rivers", "adapter_name": "sailor"}
    base = {
        "id": "job-1", "name": "Sailor", "state": "running", "spec": spec, "dataset_id": "ds-1",
        "dataset_name": "rivers", "adapter_name": "sailor", "created_at": NOW, "step": 3, "total_steps": 12,
        "loss": 1.25,
    }  # fmt: skip
    return schemas.Job.model_validate({**base, **fields})


def metrics() -> Rows[schemas.JobMetric]:
    return Rows(
        schemas.JobMetric(step=step, time=NOW + timedelta(seconds=step), loss=loss, eval_loss=None, tokens=step * 256)
        for step, loss in enumerate([None, 3.0, 2.0, None, 1.0])
    )


def test_a_job_is_a_card_with_its_progress() -> None:
    shown = job(waiting_reason="the engine is busy")._repr_html_()  # type: ignore[attr-defined]
    for part in ("Sailor", "running", "3 of 12", "1.25", "rivers", "the engine is busy", "width:25.0%"):
        assert part in shown


def test_what_people_wrote_is_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    for shown in (
        job(name=hostile)._repr_html_(),  # type: ignore[attr-defined]
        Rows([job(name=hostile)])._repr_html_(),
        schemas.Page[schemas.Job](items=[job(name=hostile)], next="<b>")._repr_html_(),  # type: ignore[attr-defined]
        Rows(
            [schemas.DatasetRow.model_validate({"index": 0, "messages": [{"role": "user", "content": hostile}]})]
        )._repr_html_(),
        html.card(hostile, hostile, [(hostile, hostile)]),
    ):
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown


def test_an_error_is_shown_with_its_code() -> None:
    error = schemas.ErrorDetail(code="out_of_memory", message="no room for the micro-batch")
    shown = job(state="failed", error=error)._repr_html_()  # type: ignore[attr-defined]
    assert "no room for the micro-batch [out_of_memory]" in shown


def test_lists_are_tables_and_say_when_they_are_empty_or_go_on() -> None:
    assert "empty" in Rows[schemas.Job]()._repr_html_()
    many = Rows(job(id=f"job-{n}") for n in range(60))._repr_html_()
    assert many.count("<tr>") == 51
    assert "and 10 more" in many
    page = schemas.Page[schemas.Job](items=[job()], next="abc")._repr_html_()  # type: ignore[attr-defined]
    assert "cursor=&#x27;abc&#x27;" in page


def test_what_is_measured_is_a_line_with_gaps_where_there_is_nothing() -> None:
    shown = metrics()._repr_html_()
    assert shown.count("<polyline") == 2, "two stretches of losses; no evaluation, so no line of it"
    assert "loss: 1 (from 1 to 3)" in shown


def test_telemetry_and_live_are_pictures() -> None:
    points = Rows([schemas.TelemetryPoint(time=NOW, interval_s=1, itl_p99_ms=12.5, decode_tokens_s=40.0)])
    assert "ITL p99, ms" in points._repr_html_()
    live = schemas.Live(
        engine=schemas.Engine(state="ready", model="small"),
        targets=schemas.Targets(version=1, targets=[schemas.TargetBody(kind="itl", ms=40)], origin="set"),
        window_s=60,
        window=points[0],
        jobs={"running": 1},
    )
    shown = live._repr_html_()  # type: ignore[attr-defined]
    assert "1 running" in shown
    assert "≤ 40 ms" in shown
    assert "power" not in shown, "nothing told it"
    drawn = live.model_copy(update={"window": points[0].model_copy(update={"power_w": 512.4})})
    assert "512 W" in drawn._repr_html_()  # type: ignore[attr-defined]


def test_every_single_body_of_the_client_has_a_picture() -> None:
    for kind in (
        schemas.Job, schemas.Dataset, schemas.Adapter, schemas.Targets, schemas.Engine, schemas.Live, schemas.Page,
        schemas.PackedPreview,
    ):  # fmt: skip
        assert callable(getattr(kind, "_repr_html_", None)), kind


def test_frames_have_a_column_a_field() -> None:
    found = metrics().polars()
    assert found["loss"].to_list() == [None, 3.0, 2.0, None, 1.0]
    assert found["loss"].dtype == polars.Float64
    assert found["time"][0] == NOW
    assert frame([job()])["adapter_name"].to_list() == ["sailor"]
    assert frame([]).is_empty()


def test_pandas_gets_the_same() -> None:
    assert metrics().pandas()["tokens"].tolist() == [0, 256, 512, 768, 1024]


def test_progress_outside_a_notebook_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show = job_progress()
    for _ in range(3):
        show(job())
    sent = upload_progress()
    for done in (5, 6, 10):
        sent(done, 10)
    assert capsys.readouterr().err.splitlines() == [
        "Sailor: running, step 3 of 12, loss 1.2500",
        "sent 5 of 10 bytes",
        "sent 10 of 10 bytes",
    ], "no line twice, and none for every block"


def test_a_client_does_not_show_its_token() -> None:
    assert "secret" not in repr(Client("http://127.0.0.1:1", token="secret"))
