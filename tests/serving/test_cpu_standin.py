"""Facts about the stand-in for SGLang's kernels: what it must not disturb."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.machine import ROOT

LOADS = """
from core.serving import cpu_standin
cpu_standin.install()
import torch
from transformers import AutoModelForCausalLM
with torch.device("meta"):
    print(torch.arange(3).device, torch.empty(3, pin_memory=True).device)
model = AutoModelForCausalLM.from_pretrained(".cache/models/SmolLM2-135M-Instruct", dtype=torch.float32)
print(model.model.rotary_emb.inv_freq[:2].tolist())
"""


@pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is not None, reason="the real kernels are here")
@pytest.mark.usefixtures("bundled_model")
def test_models_that_are_loaded_beside_it_are_whole() -> None:
    ran = subprocess.run([sys.executable, "-c", LOADS], cwd=ROOT, capture_output=True, text=True, check=True)
    devices, frequencies = ran.stdout.splitlines()
    assert devices == "meta meta"
    assert frequencies.startswith("[1.0, 0.69")
