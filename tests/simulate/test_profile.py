"""Facts about device profiles as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import Invalid, NotFound
from core.simulate.device import Device
from core.simulate.profile import read_profile, shipped
from tests.simulate.small_device import small_profile


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(small_profile().model_dump_json(exclude_defaults=True))
    assert read_profile(path) == small_profile()


def test_the_shipped_devices_go_by_name() -> None:
    assert shipped() == ["a100", "ada6000", "h200"]
    assert read_profile("h200").device == "NVIDIA H200"


def test_a_missing_device_is_told_with_those_that_exist() -> None:
    with pytest.raises(NotFound, match="h100: no such device; give a100, ada6000, h200 or the path"):
        read_profile("h100")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sms": 0}, "sms is '0'"),
        ({"layouts": []}, "layouts is"),
        ({"kv_bytes_per_token": "many"}, "kv_bytes_per_token is 'many'"),
        ({"surprise": 1}, "surprise is '1'"),
    ],
)
def test_a_bad_profile_is_named_by_file_field_and_value(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(json.loads(small_profile().model_dump_json()) | change))
    with pytest.raises(Invalid, match=r"device\.json: .*make the profile again") as caught:
        read_profile(path)
    assert said in caught.value.message


def test_a_file_that_is_not_json_is_told(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text("not json")
    with pytest.raises(Invalid, match=r"device\.json: file is "):
        read_profile(path)


def test_a_device_without_the_whole_layout_is_refused() -> None:
    profile = small_profile()
    with pytest.raises(Invalid, match="no layout 'whole'"):
        Device(profile.model_copy(update={"layouts": profile.layouts[1:]}))
