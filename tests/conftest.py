"""Fixtures that several rooms share."""

import signal

import pytest

# A run that a shell started in the background is told to ignore Ctrl-C, and so would be what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.machine", "tests.stack", "tests.store"]


@pytest.hookimpl(tryfirst=True)  # the group is read by a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests: those with an engine are one process's, which thus starts it once, and
    so are those of a file, with what the file has set up; the engine's come first, since they take longest."""
    for item in items:
        group = "engine" if item.get_closest_marker("engine") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)
