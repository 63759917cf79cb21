"""Adapters: upload of a peft folder as a zip or as files, versions, deployment, download, delete."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect
from safetensors.numpy import save

from tests.app.browser import entry, visit
from tests.app.conftest import Backstage

pytestmark = pytest.mark.browser

RANK = 4


@pytest.fixture(scope="package")
def adapter_files(bundled_model: Path) -> dict[str, bytes]:
    """What peft writes for an adapter of q_proj and v_proj of the served model; its B is zero: it changes nothing."""
    model = json.loads((bundled_model / "config.json").read_text())
    width = model["hidden_size"]
    tensors: dict[str, Any] = {}
    outputs = {"q_proj": width, "v_proj": width // model["num_attention_heads"] * model["num_key_value_heads"]}
    for layer in range(model["num_hidden_layers"]):
        for module, output in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{at}.lora_A.weight"] = np.full((RANK, width), 0.01, np.float32)
            tensors[f"{at}.lora_B.weight"] = np.zeros((output, RANK), np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": bundled_model.name,
        "r": RANK,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": list(outputs),
        "bias": "none",
    }
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture
def make_adapter(backstage: Backstage, adapter_files: dict[str, bytes]) -> Callable[[str], None]:
    def make(name: str) -> None:
        backstage.client.upload_adapter(io.BytesIO(zipped(adapter_files)), name, filename=f"{name}.zip")

    return make


def offer(page: Page, backstage: Backstage, files: dict[str, bytes]) -> None:
    visit(page, f"{backstage.url}/adapters", "Adapters")
    page.set_input_files(
        "input[type=file]",
        files=[
            {"name": name, "mimeType": "application/octet-stream", "buffer": content} for name, content in files.items()
        ],
    )


def names(backstage: Backstage) -> list[str]:
    return [adapter.name for adapter in backstage.client.adapters().items]


def test_a_zip_becomes_an_adapter(page: Page, backstage: Backstage, adapter_files: dict[str, bytes]) -> None:
    offer(page, backstage, {"zipped-one.zip": zipped(adapter_files)})
    expect(entry(page, "Name")).to_have_value("zipped-one")
    page.get_by_role("button", name="Upload and check").click()
    expect(page.get_by_role("heading", level=1, name="zipped-one", exact=True)).to_be_visible()
    expect(page.get_by_text("rank 4")).to_be_visible()
    (version,) = backstage.client.adapter("zipped-one").versions
    assert (version.rank, version.alpha, version.origin) == (RANK, 8, "imported")


def test_the_files_themselves_become_an_adapter(
    page: Page, backstage: Backstage, adapter_files: dict[str, bytes]
) -> None:
    offer(page, backstage, adapter_files)
    entry(page, "Name").fill("loose-files")
    button = page.get_by_role("button", name="Upload and check")
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_role("heading", level=1, name="loose-files", exact=True)).to_be_visible()
    assert "loose-files" in names(backstage)


def test_what_is_no_adapter_is_refused_and_not_stored(page: Page, backstage: Backstage) -> None:
    offer(page, backstage, {"notes.zip": zipped({"notes.txt": b"hello"})})
    page.get_by_role("button", name="Upload and check").click()
    alert = page.get_by_test_id("stAlert")
    expect(alert).to_contain_text("Uploading notes.zip failed.")
    expect(alert).to_contain_text("adapter_config.json")
    assert "notes" not in names(backstage)


def test_a_taken_name_is_said_before_the_upload(
    page: Page, backstage: Backstage, adapter_files: dict[str, bytes], make_adapter: Callable[[str], None]
) -> None:
    make_adapter("taken-one")
    offer(page, backstage, {"taken-one.zip": zipped(adapter_files)})
    button = page.get_by_role("button", name="Upload and check")
    expect(button).to_be_disabled()
    page.get_by_text("Store it as a new version of that adapter").click()
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_text("Version 2", exact=True)).to_be_visible()


def test_deploying_shows_that_it_is_on_its_way(
    page: Page, backstage: Backstage, make_adapter: Callable[[str], None]
) -> None:
    make_adapter("wanted-one")
    visit(page, f"{backstage.url}/adapters?adapter=wanted-one", "wanted-one")
    expect(page.get_by_text("not deployed")).to_be_visible()
    page.get_by_role("button", name="Deploy").click()
    expect(page.get_by_text("loading v1")).to_be_visible()
    assert backstage.client.adapter("wanted-one").wanted_version == 1


def test_an_alias_is_promoted_and_rolled_back(
    page: Page, backstage: Backstage, adapter_files: dict[str, bytes], make_adapter: Callable[[str], None]
) -> None:
    make_adapter("named-one")
    archive = io.BytesIO(zipped(adapter_files))
    backstage.client.upload_adapter(archive, "named-one", filename="named-one.zip", new_version=True)
    backstage.client.promote_adapter("named-one", "prod", 1)
    visit(page, f"{backstage.url}/adapters?adapter=named-one", "named-one")
    expect(page.get_by_text("named-one@prod → version 1")).to_be_visible()
    entry(page, "Alias").fill("prod")
    entry(page, "Alias").press("Tab")
    page.get_by_role("button", name="Promote").click()
    expect(page.get_by_text("named-one@prod → version 2")).to_be_visible()
    page.get_by_role("button", name="Back to version 1").click()
    expect(page.get_by_text("named-one@prod → version 1")).to_be_visible()
    assert backstage.client.adapter("named-one").aliases[0].history == []


def test_a_version_can_be_downloaded_as_peft_wrote_it(
    page: Page, backstage: Backstage, make_adapter: Callable[[str], None], tmp_path: Path
) -> None:
    make_adapter("fetched-one")
    visit(page, f"{backstage.url}/adapters?adapter=fetched-one", "fetched-one")
    with page.expect_download() as started:
        page.get_by_role("button", name="Download").click()
    path = tmp_path / "adapter.zip"
    started.value.save_as(path)
    with zipfile.ZipFile(path) as archive:
        assert {Path(name).name for name in archive.namelist()} >= {"adapter_config.json", "adapter_model.safetensors"}


def test_deleting_is_confirmed(page: Page, backstage: Backstage, make_adapter: Callable[[str], None]) -> None:
    make_adapter("doomed-one")
    visit(page, f"{backstage.url}/adapters?adapter=doomed-one", "doomed-one")
    page.get_by_role("button", name="Delete all").click()
    assert "doomed-one" in names(backstage)
    page.get_by_role("button", name="Delete them all").click()
    expect(page.get_by_role("heading", level=1, name="Adapters", exact=True)).to_be_visible()
    assert "doomed-one" not in names(backstage)
