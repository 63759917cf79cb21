"""The parts that run for real in tests: the bundled model's folder and the whole stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import Settings
from core.serving import model_folder
from tests.machine import ROOT


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The bundled model's folder, converted once per checkout into .cache."""
    return model_folder.ensure(Settings(data_dir=ROOT / ".cache"))
