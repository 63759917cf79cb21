"""Fixtures of the simulator's tests."""

from __future__ import annotations

import pytest

from core.simulate.device import Device
from tests.simulate.small_device import small_profile


@pytest.fixture
def small() -> Device:
    """The small device, without noise."""
    return Device(small_profile())
