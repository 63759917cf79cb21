"""Aliases of adapters: promoted, served under their own names, rolled back, let go of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from core.api import schemas
from core.control import adapters, aliases, openai_models
from core.control.context import Control
from core.errors import Conflict, NotFound
from tests.control import files
from tests.control.peer import AdapterServer, EnginePeer
from tests.stack import until


@pytest.fixture
def captain(control: Control, tmp_path: Path) -> schemas.Adapter:
    """An adapter of three versions."""
    for number in range(3):
        folder = files.adapter(tmp_path / f"captain-{number}")
        made = adapters.upload(control, folder, "captain", new_version=number > 0)
    return made


def alias(control: Control, name: str = "prod") -> schemas.AdapterAlias:
    return next(found for found in adapters.get(control, "captain").aliases if found.alias == name)


def test_an_alias_stands_for_the_version_last_promoted_and_goes_back_step_by_step(
    control: Control, captain: schemas.Adapter
) -> None:
    for version in (1, 3, 2):
        aliases.promote(control, "captain", "prod", version)
    assert (alias(control).wanted_version, alias(control).history) == (2, [1, 3])
    assert alias(control).address == "captain@prod"
    aliases.promote(control, "captain", "prod", 2)
    assert alias(control).history == [1, 3], "promoting what it is changes nothing"
    aliases.roll_back(control, "captain", "prod")
    assert (alias(control).wanted_version, alias(control).history) == (3, [1])
    adapters.delete(control, "captain", 1)
    with pytest.raises(Conflict, match="no other version that there still is"):
        aliases.roll_back(control, "captain", "prod")
    aliases.promote(control, "captain", "beta", None)
    assert [found.alias for found in adapters.page(control, 10, None).items[0].aliases] == ["beta", "prod"]


def test_references_are_names_versions_and_aliases(control: Control, captain: schemas.Adapter) -> None:
    aliases.promote(control, "captain", "prod", 2)
    with control.store.read() as session:
        found = [aliases.resolved(session, text).version for text in ("captain", "captain@1", "captain@prod")]
        assert found == [3, 1, 2]
        assert aliases.numbered(session, "captain@prod") == "captain@2"
        assert aliases.numbered(session, "captain@beta") == "captain@beta"
        for text, words in (("mate", "no adapter mate"), ("captain@9", "no version 9"), ("captain@beta", "are: prod")):
            with pytest.raises(NotFound, match=words):
                aliases.resolved(session, text)


def test_what_an_alias_stands_for_is_not_deleted_under_it(control: Control, captain: schemas.Adapter) -> None:
    aliases.promote(control, "captain", "prod", 2)
    with pytest.raises(Conflict, match="captain@prod stands for version 2"):
        adapters.delete(control, "captain", 2)
    aliases.delete(control, "captain", "prod")
    with pytest.raises(NotFound, match="no alias prod; there are: none"):
        aliases.delete(control, "captain", "prod")
    adapters.delete(control, "captain", 2)
    assert aliases.promote(control, "captain", "prod", 1).aliases[0].history == [], "a new one of the same name"
    adapters.delete(control, "captain", None)
    assert adapters.page(control, 10, None).items == []


def test_the_engine_serves_it_under_its_own_name_until_it_is_deleted(
    control: Control,
    connect: Callable[..., EnginePeer],
    adapter_server: AdapterServer,
    captain: schemas.Adapter,
) -> None:
    connect(http_url=adapter_server.url).hello()

    def serves(**wanted: int) -> None:
        loaded = {name.replace("_", "@"): str(control.adapter_folder("captain", v)) for name, v in wanted.items()}
        until(lambda: adapter_server.loaded == loaded, what=f"{loaded}, it is {adapter_server.loaded}")

    aliases.promote(control, "captain", "prod", 1)
    adapters.deploy(control, "captain", 3)
    serves(captain=3, captain_prod=1)
    until(lambda: alias(control).deployment == "deployed")
    assert [model.id for model in openai_models.page(control).data] == ["small", "captain", "captain@prod"]
    assert openai_models.served(control, "captain@prod").model == "small:captain@prod"
    aliases.promote(control, "captain", "prod", 2)
    serves(captain=3, captain_prod=2)
    aliases.delete(control, "captain", "prod")
    with pytest.raises(NotFound, match="no model captain@prod"):
        openai_models.served(control, "captain@prod")
    serves(captain=3)


def test_promoting_leaves_no_moment_in_which_a_request_is_not_answered(
    control: Control,
    connect: Callable[..., EnginePeer],
    adapter_server: AdapterServer,
    captain: schemas.Adapter,
) -> None:
    connect(http_url=adapter_server.url).hello()
    aliases.promote(control, "captain", "prod", 1)
    until(lambda: alias(control).deployed_version == 1)
    adapter_server.in_use.set()  # a request that the version before has to answer to its end
    answers: list[str] = []
    refused: list[object] = []
    enough = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=30) as http:
            while not enough.is_set():
                try:
                    served = openai_models.served(control, "captain@prod")
                    body = {"model": served.model, "messages": [{"content": "Who?"}], "max_tokens": 1}
                    answer = http.post(f"{served.url}/v1/chat/completions", json=body)
                    answers.append(answer.raise_for_status().json()["choices"][0]["message"]["content"])
                except (NotFound, httpx.HTTPError) as error:
                    refused.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for version in (1, 2, 3, 1):
            aliases.promote(control, "captain", "prod", version)
            shown = f"Who? {control.adapter_folder('captain', version)}"
            until(lambda shown=shown: answers[-1:] == [shown], what=f"an answer of version {version}")  # type: ignore[misc]
            assert alias(control).deployment in ("loading", "deployed")
    finally:
        enough.set()
        asking.join(60)
        adapter_server.in_use.clear()
    assert refused == []
    assert list(dict.fromkeys(answers)) == [f"Who? {control.adapter_folder('captain', v)}" for v in (1, 2, 3)]
