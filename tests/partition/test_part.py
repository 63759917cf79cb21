from __future__ import annotations

import pytest
import torch

from core.partition import green
from core.partition.part import whole_device
from core.policy.types import WHOLE, Layout


def test_where_there_are_no_green_contexts_the_whole_device_is_the_only_layout() -> None:
    partitions = green.make(torch.device("cpu"), 6)
    assert partitions.layouts == (WHOLE,)
    assert green.describe(partitions) == ["whole"]


def test_a_layout_that_was_not_made_has_no_part() -> None:
    with pytest.raises(KeyError):
        whole_device().of(Layout("split", 64, 68))
