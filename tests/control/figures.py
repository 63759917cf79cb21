"""The history of telemetry as a client reads it."""

from __future__ import annotations

from pydantic import TypeAdapter

from core.api.schemas import TelemetryPoint
from core.control import telemetry
from core.control.context import Control

_POINTS = TypeAdapter(list[TelemetryPoint])


def history(control: Control, seconds: float, points: int) -> list[TelemetryPoint]:
    return _POINTS.validate_json(telemetry.history_json(control, seconds, points))
