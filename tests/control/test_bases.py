"""Jobs on a base model that is not served: which there are, what is refused, and what becomes of the adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.api import schemas
from core.control import adapters, aliases, engines, jobs, merging, owner
from core.control.context import Control
from core.control.openai_jobs import _model
from core.errors import HarliError, Invalid, NotFound, Unavailable
from core.link.messages import BaseModel, StartJob
from db.base import now
from db.engines import EngineRecord
from tests.control import files
from tests.control.peer import MODULES, AdapterServer, EnginePeer
from tests.intake import models
from tests.stack import until

Submit = Callable[..., schemas.Job]
Connect = Callable[..., EnginePeer]


@pytest.fixture
def store_url(sqlite_url: str) -> str:
    return sqlite_url


@pytest.fixture
def bases(tmp_path: Path) -> tuple[BaseModel, ...]:
    folder = models.write(tmp_path / "other", models.CHATML, eos="<|im_end|>")
    (folder / "config.json").write_text(
        '{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,'
        ' "vocab_size": 64}'
    )
    usable = BaseModel(
        name="other", path=str(folder), parameters=9000, layers=6, window_layers=4, window_bytes=1000, host_bytes=3000
    )
    return usable, BaseModel(name="gone", path="/nowhere/gone", refused="there is no folder /nowhere/gone")


@pytest.fixture
def engine(control: Control, bases: tuple[BaseModel, ...]) -> Callable[..., None]:
    """Makes an engine that was here."""

    def make(**hello: Any) -> None:
        time = now()
        with control.store.write() as session:
            for other in session.query(EngineRecord):
                session.delete(other)
            content = {
                "model": "small", "model_path": "nowhere", "max_lora_rank": 8, "lora_modules": list(MODULES),
                "dtype": "float32", "http_url": "http://127.0.0.1:1", "device": "cpu", "device_name": "a CPU",
                "base_models": msgspec.to_builtins(bases),
            }  # fmt: skip
            session.add(EngineRecord(id="e", state="ready", hello={**content, **hello}, since=time, state_since=time))

    make()
    return make


def refusal(submit: Submit, **fields: Any) -> HarliError:
    with pytest.raises(HarliError) as caught:
        submit(**fields)
    return caught.value


def trained(control: Control, tmp_path: Path, name: str, base: str | None) -> schemas.Adapter:
    """An adapter as a job on the base leaves it."""
    source = files.adapter(tmp_path / f"made-{name}")
    with adapters.unpacked(control, source, max_bytes=10**9) as (folder, info), control.store.write() as session:
        record = adapters.store(control, session, folder, info, name, tenant="default", origin="trained", base=base)
        session.flush()
        return adapters.view(session, record)


# ---- submitting ------------------------------------------------------------------------------------------------------


def test_a_job_names_its_base_and_its_adapter_is_not_deployed(engine: object, submit: Submit) -> None:
    job = submit(base_model="other")
    assert (job.spec.base_model, job.spec.deploy) == ("other", False)
    assert submit("plain").spec.deploy is True, "of the served one it is"


def test_the_served_model_may_be_named_and_is_no_other_base(engine: object, submit: Submit) -> None:
    job = submit(base_model="small")
    assert (job.spec.base_model, job.spec.deploy) == (None, True)


def test_a_base_that_is_not_there_is_refused_with_those_that_are(engine: object, submit: Submit) -> None:
    error = refusal(submit, base_model="nobody")
    assert (error.code, error.param) == ("base_model", "base_model")
    assert "there are small, which is served, other, gone" in error.message
    assert "HARLI_FINETUNE__BASE_MODELS" in error.message


def test_a_base_that_cannot_be_used_is_refused_with_the_engines_reason(engine: object, submit: Submit) -> None:
    assert refusal(submit, base_model="gone").message == (
        "base model gone cannot be finetuned: there is no folder /nowhere/gone"
    )


def test_before_an_engine_was_here_no_base_is_known(submit: Submit) -> None:
    error = refusal(submit, base_model="other")
    assert isinstance(error, Unavailable) and "start it" in error.message


@pytest.mark.parametrize(("field", "value"), [("deploy", True), ("sample_prompts", ["Where does the river go?"])])
def test_what_needs_the_adapter_served_is_refused(field: str, value: object, engine: object, submit: Submit) -> None:
    error = refusal(submit, base_model="other", **{field: value})
    assert error.param == field and "the engine serves small, not other" in error.message


def test_rows_are_counted_with_the_bases_tokenizer_and_memory_with_its_window(
    control: Control, engine: object, dataset: schemas.Dataset
) -> None:
    def estimate(**fields: Any) -> Any:
        body = schemas.JobCreate.model_validate({"dataset": dataset.name, "adapter_name": "sailor", **fields})
        return jobs.estimate(control, body)

    other = estimate(base_model="other")
    assert other.tokens is not None and estimate().tokens is None, "the served model's folder is not here"
    assert other.memory.fits is True and other.memory.needed_bytes > 4000
    assert "the weights of other and a window of 4 of its layers" in other.memory.reason


def test_an_adapter_of_another_base_is_nothing_to_start_from(
    control: Control, engine: object, submit: Submit, tmp_path: Path
) -> None:
    trained(control, tmp_path, "theirs", "other")
    trained(control, tmp_path, "ours", None)
    error = refusal(submit, initial_adapter="theirs")
    assert error.code == "initial_adapter_base" and "give base_model other" in error.message
    assert refusal(submit, initial_adapter="ours", base_model="other").code == "initial_adapter_base"
    assert submit(initial_adapter="theirs", base_model="other").spec.initial_adapter == "theirs"
    assert submit("third", initial_adapter="ours").spec.initial_adapter == "ours"


def test_a_clone_on_another_base_is_not_deployed(control: Control, engine: object, submit: Submit) -> None:
    first = submit("first")
    copy, _ = jobs.clone(control, first.id, {"adapter_name": "second", "base_model": "other"}, None)
    assert (copy.spec.base_model, copy.spec.deploy) == ("other", False)
    again, _ = jobs.clone(control, copy.id, {"adapter_name": "third"}, None)
    assert (again.spec.base_model, again.spec.deploy) == ("other", False)


def test_openais_model_may_be_a_base(control: Control, engine: object) -> None:
    assert _model(control, "other") == ("other", None)
    assert _model(control, "small") == (None, None)
    with pytest.raises(NotFound, match="another base model"):
        _model(control, "nobody")


def test_the_engine_tells_people_which_bases_there_are(control: Control, engine: object) -> None:
    with control.store.read() as session:
        usable, gone = engines.view(session).base_models
    assert (usable.name, usable.layers, usable.window_layers, usable.refused) == ("other", 6, 4, None)
    assert gone.refused == "there is no folder /nowhere/gone"


# ---- its adapter -----------------------------------------------------------------------------------------------------


def test_the_order_and_the_stored_adapter_name_the_base(
    control: Control, connect: Connect, submit: Submit, bases: tuple[BaseModel, ...], tmp_path: Path
) -> None:
    peer = connect()
    peer.hello(base_models=bases)
    until(lambda: _known(control), what="the engine")
    job = submit(base_model="other")
    order = peer.expect(StartJob)
    assert order.spec.base_model == "other"
    peer.update(job.id, order.token, "started", total_steps=3, message="base other: 6 layers")
    made = files.adapter(tmp_path / "out")
    peer.update(job.id, order.token, "succeeded", step=3, path=str(made))
    until(lambda: jobs.get(control, job.id).state == "succeeded", what="the job")
    assert any("base other: 6 layers" in event.message for event in jobs.events(control, job.id, 0, 100))
    assert "base other: 6 layers" in [line.message for line in jobs.log(control, job.id, 0, 100)]
    adapter = adapters.get(control, "sailor")
    assert (adapter.versions[0].base, adapter.deployment) == ("other", "none")


def _known(control: Control) -> bool:
    with control.store.read() as session:
        return engines.known(session) is not None


def test_it_is_not_deployed_to_an_engine_that_serves_another_base(
    control: Control, engine: Callable[..., None], tmp_path: Path
) -> None:
    trained(control, tmp_path, "theirs", "other")
    for ask in (
        lambda: adapters.deploy(control, "theirs", None),
        lambda: aliases.promote(control, "theirs", "stable", None),
    ):
        with pytest.raises(Invalid, match="belongs to base model other and the engine serves small") as caught:
            ask()
        assert caught.value.code == "base_differs"
    engine(model="other")
    assert adapters.deploy(control, "theirs", None).deployment == "loading"


def test_what_was_served_before_is_not_loaded_into_an_engine_of_another_base(
    control: Control, connect: Connect, adapter_server: AdapterServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_DEPLOY_S", 0.05)
    connect(http_url=adapter_server.url).hello()
    until(lambda: _known(control), what="the engine")
    trained(control, tmp_path, "ours", None)
    adapters.deploy(control, "ours", None)
    until(lambda: adapters.get(control, "ours").deployment == "deployed", what="the adapter")
    before = len(adapter_server.calls)
    connect("engine-2", http_url=adapter_server.url).hello(model="larger")
    until(lambda: adapters.get(control, "ours").deployment == "failed", what="the refusal")
    error = adapters.get(control, "ours").error
    assert error is not None and error.code == "base_differs" and "the engine serves larger" in error.message
    assert len(adapter_server.calls) == before


def test_it_is_added_up_with_its_like_only(control: Control, engine: object, tmp_path: Path) -> None:
    trained(control, tmp_path, "theirs", "other")
    trained(control, tmp_path, "ours", None)
    parts = [schemas.AdapterPart(adapter=name) for name in ("ours", "theirs")]
    with pytest.raises(Invalid, match="give adapters of one base"):
        merging.combine(control, "both", parts, False)


def test_it_cannot_be_merged_into_a_base_that_is_gone(
    control: Control, engine: Callable[..., None], tmp_path: Path
) -> None:
    trained(control, tmp_path, "theirs", "other")
    engine(base_models=[])
    with pytest.raises(Invalid, match="belongs to base model other, which is not there"):
        merging.export(control, "theirs", None)


def test_downloaded_and_uploaded_again_it_still_belongs_to_its_base(
    control: Control, engine: object, tmp_path: Path
) -> None:
    folder = files.adapter(tmp_path / "again", base_model_name_or_path="other")
    with pytest.raises(Invalid, match="was trained on other, and the engine serves small"):
        adapters.upload(control, folder, "again", False)
