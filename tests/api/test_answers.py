"""An answer that many ask for is made once, until the store changes or a moment has passed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

from core.api import answers
from core.api.answers import Answers
from db import changes
from db.store import Store

NUMBERS = TypeAdapter(list[int])


class Maker:
    """Makes [1], then [2] ..."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> list[int]:
        self.made += 1
        time.sleep(0.01)
        return [self.made]


@pytest.fixture
def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(answers, "_KEPT_S", 60.0)
    kept = Answers(store)

    def run(make: Maker, *keys: str, **options: bool) -> list[Any]:
        async def every() -> list[Any]:
            return await asyncio.gather(*(kept.get(key, make, NUMBERS, **options) for key in keys))

        return [NUMBERS.validate_json(bytes(response.body)) for response in asyncio.run(every())]

    return run


def commit(store: Store) -> None:
    with store.write() as session:
        changes.add(session, "engine", "ready", None)


def test_those_who_ask_together_get_one_answer(asked: Callable[..., Any]) -> None:
    assert asked(Maker(), *["key"] * 8) == [[1]] * 8


def test_keys_are_apart(asked: Callable[..., Any]) -> None:
    make = Maker()
    asked(make, "this", "that")
    assert make.made == 2


def test_a_change_of_the_store_is_seen_at_once(asked: Callable[..., Any], store: Store) -> None:
    make = Maker()
    assert asked(make, "key") == [[1]]
    commit(store)
    assert asked(make, "key") == [[2]]


def test_what_goes_by_the_clock_does_not_change_with_the_store(asked: Callable[..., Any], store: Store) -> None:
    make = Maker()
    assert asked(make, "key", steady=True) == [[1]]
    commit(store)
    assert asked(make, "key", steady=True) == [[1]]


def test_nothing_is_kept_for_long(asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    asked(make, "key")
    monkeypatch.setattr(answers, "_KEPT_S", 0.0)
    assert asked(make, "key", steady=True) == [[2]]
