"""An answer that many ask for is made once, until what it tells of changes or a moment has passed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from core.api import answers
from core.api.answers import Answers
from core.errors import NotFound
from db import changes
from db.scope import Scope
from db.store import Store
from tests.api.inside import Inside, inside
from tests.control import files

NUMBERS = TypeAdapter(list[int])
TABLES = frozenset({"changes"})


class Maker:
    """Makes [1], then [2] ..., each as slowly as `during` takes."""

    def __init__(self, during: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
        self.made = 0
        self._during = during

    def __call__(self) -> list[int]:
        self.made += 1
        found = self.made
        self._during()
        return [found]


@pytest.fixture
def kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.setattr(answers, "_KEPT_S", 60.0)
    return Answers(store)


async def ask(kept: Answers, make: Callable[[], Any], key: str = "key", tables: Collection[str] = TABLES) -> Any:
    place = (Scope("default"), key, b"")
    answer = await kept.get(place, lambda: NUMBERS.dump_json(make()), tables)
    return NUMBERS.validate_json(bytes(answer.body))


def run(*steps: Callable[[], Awaitable[Any]]) -> list[Any]:
    """What each answers, one after the other in one event loop."""

    async def every() -> list[Any]:
        return [await step() for step in steps]

    return asyncio.run(every())


def commit(store: Store) -> None:
    with store.write() as session:
        changes.add(session, "engine", "ready", None)


def test_those_who_ask_together_get_one_answer(kept: Answers) -> None:
    make = Maker()
    assert run(lambda: asyncio.gather(*(ask(kept, make) for _ in range(8))), lambda: ask(kept, make)) == [
        [[1]] * 8,
        [1],
    ]


def test_keys_are_apart(kept: Answers) -> None:
    make = Maker()
    run(lambda: ask(kept, make, "this"), lambda: ask(kept, make, "that"))
    assert make.made == 2


def test_a_change_of_its_tables_is_seen_at_once(kept: Answers, store: Store) -> None:
    make = Maker()

    async def change() -> None:
        commit(store)

    assert run(lambda: ask(kept, make), change, lambda: ask(kept, make)) == [[1], None, [2]]


@pytest.mark.parametrize("tables", [(), frozenset({"jobs"})])
def test_a_change_of_other_tables_is_none_of_its(kept: Answers, store: Store, tables: Collection[str]) -> None:
    make = Maker()

    async def change() -> None:
        commit(store)

    found = run(lambda: ask(kept, make, tables=tables), change, lambda: ask(kept, make, tables=tables))
    assert found == [[1], None, [1]]


def test_what_changes_while_it_is_made_is_in_the_answer_of_who_asks_afterwards(kept: Answers, store: Store) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def during() -> None:
        begun.set()
        go_on.wait(10)

    make = Maker(during)

    async def both() -> list[Any]:
        early = asyncio.create_task(ask(kept, make))
        await asyncio.to_thread(begun.wait, 10)
        commit(store)
        late = asyncio.create_task(ask(kept, make))
        await asyncio.sleep(0)
        go_on.set()
        return [await early, await late]

    assert run(both) == [[[1], [2]]]


def test_nothing_is_kept_for_long(kept: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()

    async def grow_old() -> None:
        monkeypatch.setattr(answers, "_KEPT_S", -1.0)

    found = run(lambda: ask(kept, make), lambda: ask(kept, make, "other"), grow_old, lambda: ask(kept, make))
    assert found == [[1], [2], None, [3]]
    assert [place[1] for place in kept._kept] == ["key"], "what is too old to be given is not held either"


def test_a_failure_is_told_to_all_who_wait_and_not_kept(kept: Answers) -> None:
    def fail() -> list[int]:
        time.sleep(0.01)
        raise NotFound("job_not_found", "there is no such job")

    async def both() -> list[Any]:
        return await asyncio.gather(ask(kept, fail), ask(kept, fail), return_exceptions=True)

    (failed,), found = run(lambda: asyncio.gather(both()), lambda: ask(kept, Maker()))
    assert [type(one) for one in failed] == [NotFound, NotFound]
    assert found == [1]


def test_who_hangs_up_takes_nothing_from_the_others(kept: Answers) -> None:
    make = Maker(lambda: time.sleep(0.05))

    async def both() -> Any:
        first = asyncio.create_task(ask(kept, make))
        second = asyncio.create_task(ask(kept, make))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert run(both) == [[1]]


# ---- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("answers")) as found:
        yield found


def submit(http: httpx.Client, folder: Path, adapter: str) -> str:
    """A new data set and a job on it; the job's id."""
    rows = files.jsonl(folder / "rows.jsonl").read_bytes()
    sent = {"file": ("rows.jsonl", rows)}
    assert http.post(f"/api/datasets?name={adapter}-rows", files=sent).status_code == 201
    job = http.post("/api/jobs", json={"dataset": f"{adapter}-rows", "adapter_name": adapter})
    assert job.status_code == 201, job.text
    return str(job.json()["id"])


def test_what_is_shared_is_shared_within_tenant_and_role(
    place: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_KEPT_S", 60.0)
    with place.someone("default", "olga", "operator") as olga:
        everyone = {"admin": place.admin, "olga": olga, "ann": place.ann, "bob": place.bob}

        def names() -> dict[str, list[str]]:
            asked = {who: http.get("/api/jobs?limit=50").json() for who, http in everyone.items()}
            return {who: [job["adapter_name"] for job in found["items"]] for who, found in asked.items()}

        submit(place.admin, tmp_path, "admins")
        assert names() == {"admin": ["admins"], "olga": ["admins"], "ann": [], "bob": []}
        for who in ("olga", "ann", "bob"):
            submit(everyone[who], tmp_path, f"{who}s")
        expected = {
            "admin": ["bobs", "anns", "olgas", "admins"],
            "olga": ["olgas", "admins"],
            "ann": ["anns"],
            "bob": ["bobs"],
        }
        assert names() == names() == expected
        live = {who: http.get("/api/live").json()["jobs"] for who, http in everyone.items()}
    assert live == {"admin": {"queued": 4}, "olga": {"queued": 2}, "ann": {"queued": 1}, "bob": {"queued": 1}}


def test_who_changes_something_finds_it_changed(place: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_KEPT_S", 60.0)
    job = submit(place.ann, tmp_path, "renamed")
    for name in ("first", "second"):
        assert place.ann.patch(f"/api/jobs/{job}", json={"name": name}).status_code == 200
        assert place.ann.get("/api/jobs").json()["items"][0]["name"] == name
    version = place.admin.get("/api/targets").json()["version"]
    targets = {"version": version, "targets": [{"kind": "itl", "ms": 41}]}
    assert place.admin.put("/api/targets", json=targets).status_code == 200
    assert place.ann.get("/api/live").json()["targets"]["version"] == version + 1
