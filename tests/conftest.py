"""Fixtures that several rooms share."""

pytest_plugins = ["tests.machine", "tests.stack", "tests.store"]
