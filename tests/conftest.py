"""Fixtures that several rooms share."""

import signal

# A run that a shell started in the background is told to ignore Ctrl-C, and so would be what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.machine", "tests.sharing", "tests.stack", "tests.store"]
