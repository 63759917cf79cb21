"""Time since things were first seen."""

from __future__ import annotations

from core.control.elapsed import Elapsed


def test_each_has_been_there_since_it_was_first_seen_and_anew_when_it_was_away() -> None:
    seconds = 100.0
    elapsed: Elapsed[str] = Elapsed(lambda: seconds)
    assert elapsed.seconds(["a"]) == {"a": 0}
    seconds = 103.0
    assert elapsed.seconds(["a", "b"]) == {"a": 3, "b": 0}
    seconds = 104.0
    assert elapsed.seconds(iter(["b"])) == {"b": 1}
    seconds = 109.0
    assert elapsed.seconds(["a", "b"]) == {"a": 0, "b": 6}
