"""What this room's tests share: transformers made importable, and one thread for its small models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from core.torchvision_ops import declare

declare()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small are only slowed by a second thread, and by a lot on a machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
