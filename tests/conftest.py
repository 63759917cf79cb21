"""Fixtures that several rooms share."""

import os
import signal

# A run that a shell started in the background is told to ignore Ctrl-C, and so would be what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Read when torch is imported: its threads would spin while they wait for each other, and starve what else runs here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.machine", "tests.sharing", "tests.stack", "tests.store"]
