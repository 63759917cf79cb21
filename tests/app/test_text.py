"""How figures, sizes, spans and text from elsewhere are written."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo

import pytest

from app.ui import text
from app.ui.text import counted, ms, number, percent, plain, size, span, when


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0.5, "0.50"), (9.994, "9.99"), (38.26, "38.3"), (1234.4, "1,234")]
)
def test_milliseconds_keep_three_digits(value: float | None, shown: str) -> None:
    assert ms(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-1, "0 s"), (45.4, "45 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (97200, "1 d 3 h")]
)
def test_a_span_has_its_two_largest_units(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB")])
def test_sizes_are_in_binary_units(count: int, shown: str) -> None:
    assert size(count) == shown


def test_one_is_counted_as_one() -> None:
    assert [counted(count, "remark") for count in (1, 2, 1200)] == ["1 remark", "2 remarks", "1,200 remarks"]


def test_what_is_missing_is_a_dash() -> None:
    assert number(None) == percent(None) == when(None) == "–"


def test_thousands_and_shares() -> None:
    assert number(1234567) == "1,234,567"
    assert percent(0.98765, 2) == "98.77"


def test_markdown_of_others_stays_text() -> None:
    assert plain("*a* [b](c) $x$ <br> `d` :red[e]") == (r"\*a\* \[b\]\(c\) \$x\$ \<br\> \`d\` \:red\[e\]")


def test_the_date_is_left_out_today(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 12, 2, 0, 0, 5, tzinfo=tz)

    monkeypatch.setattr(text, "datetime", Clock)
    assert when(datetime(2026, 12, 2, 0, 0, 4, tzinfo=UTC)) == "00:00:04"
    assert when(datetime(2026, 12, 1, 23, 59, 59, tzinfo=UTC)) == "2026-12-01 23:59:59"
