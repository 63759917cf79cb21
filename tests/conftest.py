"""Fixtures that several rooms share."""

import gc
import os
import signal

import pytest

# What is imported stays: to look through it again and again for what does not took half of the time of collecting.
gc.disable()
# A run that a shell started in the background is told to ignore Ctrl-C, and so would be what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Read when torch is imported: its threads would spin while they wait for each other, and starve what else runs here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.machine", "tests.sharing", "tests.stack", "tests.store"]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()
