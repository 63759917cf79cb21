"""The engine serves what is wanted: loading, replacing, unloading, refusals, fresh engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.api import schemas
from core.control import adapters, deployer, owner
from core.control.context import Control
from core.errors import Invalid, NotFound
from db import changes
from tests.control import files
from tests.control.peer import AdapterServer, EnginePeer
from tests.stack import until

Connect = Callable[..., EnginePeer]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_DEPLOY_S", 0.05)


@pytest.fixture
def served(connect: Connect, adapter_server: AdapterServer) -> AdapterServer:
    """The routes of an engine that has said hello."""
    connect(http_url=adapter_server.url).hello()
    return adapter_server


@pytest.fixture
def captain(control: Control, tmp_path: Path) -> schemas.Adapter:
    return adapters.upload(control, files.adapter(tmp_path / "captain"), "captain", False)


def reaches(control: Control, name: str, deployment: str, version: int | None = None) -> schemas.Adapter:
    def ready() -> schemas.Adapter | None:
        adapter = adapters.get(control, name)
        return adapter if (adapter.deployment, adapter.deployed_version) == (deployment, version) else None

    return until(ready, 30, f"{name} to be {deployment}, it is {adapters.get(control, name)}")


def test_a_wanted_version_is_loaded_from_its_folder(
    control: Control, served: AdapterServer, captain: schemas.Adapter
) -> None:
    assert captain.deployment == "none"
    assert adapters.deploy(control, "captain", None).deployment == "loading"
    reaches(control, "captain", "deployed", 1)
    assert served.loaded == {"captain": str(control.adapter_folder("captain", 1))}
    assert adapters.deploy(control, "captain", 1).deployment == "deployed", "what is served already stays"


def test_a_new_version_takes_the_old_ones_place_and_that_one_goes_when_its_requests_have_ended(
    control: Control, served: AdapterServer, captain: schemas.Adapter, tmp_path: Path
) -> None:
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    adapters.upload(control, files.adapter(tmp_path / "second"), "captain", True)
    first, second = (str(control.adapter_folder("captain", version)) for version in (1, 2))
    served.in_use.set()
    assert adapters.deploy(control, "captain", None).deployment == "loading"
    reaches(control, "captain", "deployed", 2)
    assert served.loaded == {"captain": second}
    assert served.draining == [first]
    assert ("/unload_lora_adapter", "captain") not in served.calls, "the name would be gone in between"
    served.in_use.clear()
    until(lambda: served.draining == [])


def test_a_version_that_is_refused_leaves_the_one_that_is_served(
    control: Control, served: AdapterServer, captain: schemas.Adapter, tmp_path: Path
) -> None:
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    adapters.upload(control, files.adapter(tmp_path / "second"), "captain", True)
    served.refuse = "no memory is left"
    adapters.deploy(control, "captain", None)
    failed = reaches(control, "captain", "failed", 1)
    assert failed.error is not None
    assert "captain@2: no memory is left" in failed.error.message
    assert served.loaded == {"captain": str(control.adapter_folder("captain", 1))}


def test_requests_that_do_not_end_are_said_and_waited_for(
    control: Control,
    served: AdapterServer,
    captain: schemas.Adapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployer, "UNLOAD_TIMEOUT_S", 0.3)
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    served.in_use.set()
    adapters.undeploy(control, "captain")
    waiting = until(lambda: (found := adapters.get(control, "captain")).error and found, what="the remark")
    assert isinstance(waiting, schemas.Adapter)
    assert waiting.error is not None
    assert (waiting.deployment, waiting.error.code) == ("unloading", "unload_waits")
    served.in_use.clear()
    assert reaches(control, "captain", "none").error is None


def test_undeploying_unloads(control: Control, served: AdapterServer, captain: schemas.Adapter) -> None:
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    adapters.undeploy(control, "captain")
    reaches(control, "captain", "none")
    assert served.loaded == {}


def test_a_refusal_is_kept_and_tried_again_only_when_asked(
    control: Control, served: AdapterServer, captain: schemas.Adapter
) -> None:
    served.refuse = "rank 64 is larger than 16"
    adapters.deploy(control, "captain", None)
    failed = reaches(control, "captain", "failed")
    assert failed.error is not None
    assert failed.error.code == "load_refused"
    assert "captain@1: rank 64 is larger than 16" in failed.error.message
    served.refuse = None
    calls = len(served.calls)
    adapters.get(control, "captain")
    assert len(served.calls) == calls
    adapters.deploy(control, "captain", None)
    assert reaches(control, "captain", "deployed", 1).error is None


def test_what_the_engine_does_not_unload_is_told(
    control: Control, served: AdapterServer, captain: schemas.Adapter
) -> None:
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    served.refuse_unload = "it is pinned"
    adapters.undeploy(control, "captain")
    failed = reaches(control, "captain", "failed", 1)
    assert failed.error is not None
    assert (failed.error.code, "captain: it is pinned" in failed.error.message) == ("unload_refused", True)


def test_a_fresh_engine_gets_what_is_wanted(
    control: Control, connect: Connect, served: AdapterServer, captain: schemas.Adapter
) -> None:
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    fresh = AdapterServer()
    try:
        connect("engine-2", fresh.url).hello()
        until(lambda: "captain" in fresh.loaded, what="the adapter in the fresh engine")
        reaches(control, "captain", "deployed", 1)
    finally:
        fresh.close()


def test_an_engine_that_has_it_loaded_unknown_to_us_gets_the_wanted_version(
    control: Control, connect: Connect, adapter_server: AdapterServer, captain: schemas.Adapter
) -> None:
    adapter_server.loaded["captain"] = "unknown"
    connect(http_url=adapter_server.url).hello()
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    assert adapter_server.loaded["captain"] == str(control.adapter_folder("captain", 1))


def test_an_engine_whose_routes_do_not_answer_yet_is_asked_again(
    control: Control, connect: Connect, captain: schemas.Adapter
) -> None:
    server = AdapterServer()
    server.close()
    connect(http_url=server.url).hello()
    adapters.deploy(control, "captain", None)
    assert adapters.get(control, "captain").deployment == "loading"


def test_a_deleted_adapter_is_gone_at_once_and_unloaded(
    control: Control, served: AdapterServer, captain: schemas.Adapter, tmp_path: Path
) -> None:
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    adapters.delete(control, "captain", None)
    with pytest.raises(NotFound):
        adapters.get(control, "captain")
    assert not control.adapter_folder("captain", 1).exists()
    until(lambda: served.loaded == {}, what="the engine to let go")
    again = adapters.upload(control, files.adapter(tmp_path / "again"), "captain", False)
    assert [version.version for version in again.versions] in ([1], [2])


def test_what_is_deleted_while_it_is_loaded_does_not_stay_in_the_engine(
    control: Control, served: AdapterServer, captain: schemas.Adapter
) -> None:
    served.held.set()
    adapters.deploy(control, "captain", None)
    until(lambda: served.calls, what="the engine to begin")
    adapters.delete(control, "captain", None)
    served.held.clear()
    until(lambda: ("/unload_lora_adapter", "captain") in served.calls, what="the engine to be told")
    until(lambda: served.loaded == {}, what="the engine to let go")


def test_requests_of_what_is_deleted_while_it_is_loaded_are_said_and_waited_for(
    control: Control, served: AdapterServer, captain: schemas.Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> list[str]:
        with control.store.read() as session:
            unloading = [change for change in changes.after(session, 0, 1000) if change.kind == "unloading"]
            return [change.data["message"] for change in unloading if change.ref == "captain"]

    monkeypatch.setattr(deployer, "UNLOAD_TIMEOUT_S", 0.3)
    served.held.set()
    adapters.deploy(control, "captain", None)
    until(lambda: served.calls, what="the engine to begin")
    adapters.delete(control, "captain", None)
    served.in_use.set()
    served.held.clear()
    assert "requests have used adapter captain for 0.3 s" in until(said)[0]
    served.in_use.clear()
    until(lambda: served.loaded == {}, what="the engine to let go")


@pytest.mark.parametrize("refuse_unload", [None, "it is pinned"])
def test_a_name_that_is_taken_up_again_while_it_is_loaded_does_not_serve_what_had_it_before(
    control: Control, served: AdapterServer, captain: schemas.Adapter, tmp_path: Path, refuse_unload: str | None
) -> None:
    served.refuse_unload = refuse_unload
    served.held.set()
    adapters.deploy(control, "captain", None)
    until(lambda: served.calls, what="the engine to begin")
    adapters.delete(control, "captain", None)
    adapters.upload(control, files.adapter(tmp_path / "again"), "captain", False)
    adapters.deploy(control, "captain", None)
    served.held.clear()
    reaches(control, "captain", "deployed", 1)
    assert [path for path, _ in served.calls] == ["/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter"]


def test_a_name_that_is_taken_up_again_at_once_is_unloaded_all_the_same(
    control: Control, served: AdapterServer, captain: schemas.Adapter, tmp_path: Path
) -> None:
    adapters.deploy(control, "captain", None)
    reaches(control, "captain", "deployed", 1)
    served.in_use.set()
    adapters.delete(control, "captain", None)
    again = adapters.upload(control, files.adapter(tmp_path / "again"), "captain", False)
    assert [version.version for version in again.versions] == [2], "a number is never given twice to what an engine has"
    served.in_use.clear()
    until(lambda: served.loaded == {}, what="the engine to let go of the first")
    assert reaches(control, "captain", "none").versions[0].version == 2


def test_deleting_the_version_that_is_served_undeploys_it(
    control: Control, served: AdapterServer, captain: schemas.Adapter, tmp_path: Path
) -> None:
    adapters.upload(control, files.adapter(tmp_path / "second"), "captain", True)
    adapters.deploy(control, "captain", 1)
    reaches(control, "captain", "deployed", 1)
    adapters.delete(control, "captain", 1)
    left = reaches(control, "captain", "none")
    assert [version.version for version in left.versions] == [2]


def test_a_rank_that_the_engine_cannot_serve_is_refused_before_it_is_asked(
    control: Control, captain: schemas.Adapter, connect: Connect, adapter_server: AdapterServer
) -> None:
    connect(http_url=adapter_server.url).hello(max_lora_rank=4)
    from core.control import engines

    def ready() -> bool:
        with control.store.read() as session:
            return engines.view(session).state == "ready"

    until(ready)
    with pytest.raises(Invalid, match=r"rank 8.*up to 4"):
        adapters.deploy(control, "captain", None)
    assert adapter_server.calls == []
