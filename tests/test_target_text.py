"""Targets as they are written on the command line."""

from __future__ import annotations

import pytest

from core import target_text
from core.api.schemas import TargetBody


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("itl=60", {"kind": "itl", "ms": 60.0}),
        ("ttft=2000@0.95", {"kind": "ttft", "ms": 2000.0, "quantile": 0.95}),
        ("acme/tpot=80", {"kind": "tpot", "ms": 80.0, "tenant": "acme"}),
        (
            "itl=40 mon-fri 09:00-17:00 Europe/Berlin",
            {
                "kind": "itl",
                "ms": 40.0,
                "windows": [
                    {"days": ["mon", "tue", "wed", "thu", "fri"], "start": "09:00", "end": "17:00",
                     "zone": "Europe/Berlin"}
                ],
            },
        ),
        ("itl=90 sat-mon; 22:00-06:00",
         {"kind": "itl", "ms": 90.0,
          "windows": [{"days": ["sat", "sun", "mon"]}, {"start": "22:00", "end": "06:00"}]}),
    ],
)  # fmt: skip
def test_what_is_written_is_what_is_meant(text: str, fields: dict[str, object]) -> None:
    assert target_text.parse(text) == fields


@pytest.mark.parametrize("text", ["", "itl", "itl=", "=60", "itl=fast", "a b/itl=5"])
def test_what_is_no_target_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="is no target; write itl=60"):
        target_text.parse(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [("speed=60", "'speed' in 'speed=60' is none of itl, tpot, ttft"), ("itl=60 25:00-26:00", "is no time of day"),
     ("itl=60 mon-fri 9-17", "is no time of day")],
)  # fmt: skip
def test_what_would_be_misread_is_named(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        target_text.parse(text)


@pytest.mark.parametrize("text", ["itl=60", "acme/ttft=900@0.95", "itl=40 mon,tue 09:00-17:00 Europe/Berlin; sun"])
def test_a_target_that_is_shown_can_be_written_again(text: str) -> None:
    target = TargetBody.model_validate(target_text.parse(text))
    assert TargetBody.model_validate(target_text.parse(target_text.text(target))) == target
