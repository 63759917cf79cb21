"""One request of a trace."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """`time_s` since the trace's start; prompt and answer lengths in tokens."""

    time_s: float
    input_tokens: int
    output_tokens: int
