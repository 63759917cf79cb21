"""The real engine on this machine's CPU: SGLang serves, peft trains on SGLang's own weights beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import plain_loop
from core.finetune.trainer import Trainer
from core.intake import packing, tokenizer
from core.link.messages import Hello, JobSpec, JobUpdate, LoraSpec, PauseJob, SetTargets, Target, Telemetry
from tests.machine import ROOT
from tests.serving.conftest import START_S, Engine
from tests.stack import free_ports

pytestmark = pytest.mark.engine

QUESTIONS = [
    "What is the capital of France?",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Name three primary colours.",
    "What does a compass do?",
    "How many days are in a week?",
    "Where do penguins live?",
    "What is bread made of?",
    "How do plants drink?",
    "Who wrote Hamlet?",
    "What is a noun?",
    "Why do cats purr?",
    "What is the largest ocean?",
    "How does a candle burn?",
    "What is a rainbow?",
    "Why do we sleep?",
    "What is ten times ten?",
    "How is glass made?",
    "What do bees make?",
    "When does winter begin?",
]
TOKENS = 12
RATE = 3e-3


@pytest.fixture(scope="session")
def plain_model(bundled_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts(bundled_model: Path) -> list[list[int]]:
    chat = tokenizer.load(bundled_model)
    rendered = [chat.render([{"role": "user", "content": q}], generation_prompt=True) for q in QUESTIONS]
    return [tokens.ids.tolist() for tokens in chat.encode(rendered)]


def spec(captain: Path, output: Path, **changes: object) -> JobSpec:
    fields: dict[str, object] = {
        "job_id": output.name,
        "dataset_path": str(captain),
        "adapter_name": "captain",
        "output_dir": str(output),
        "epochs": None,
        "max_steps": 6,
        "micro_batch_tokens": 64,  # a row: the steps count here, not the tokens
        "sequence_length": 64,
        "checkpoint_every": 2,
        "evaluation_fraction": 0.0,
    }
    return JobSpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def trained(engine: Engine, captain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of a job that ran in the engine while nothing decoded."""
    job = spec(captain, tmp_path_factory.mktemp("job"), learning_rate=RATE)
    engine.run(job, token=1)
    path = engine.update("succeeded", job.job_id, 300).path
    assert path is not None
    return Path(path)


def hello(engine: Engine) -> Hello:
    return next(m for m in engine.received if isinstance(m, Hello))


def test_it_announces_itself_with_its_solo_step_time(engine: Engine) -> None:
    said = hello(engine)
    assert said.device == "cpu" and said.dtype == "float32"
    assert said.versions["sglang"] == "0.5.16"
    assert said.solo_itl_ms is not None and 1.0 < said.solo_itl_ms < 5000.0
    assert said.kv_tokens > 1000


def test_served_logits_are_those_of_the_hugging_face_model(
    engine: Engine, plain_model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    ids = [token for prompt in prompts[:3] for token in prompt]
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = engine.http.post("/generate", json=body).json()
    served = torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])
    with torch.no_grad():
        logits = plain_model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(served, expected, atol=2e-3, rtol=1e-3)


def test_losses_in_the_engine_are_those_of_a_plain_loop(engine: Engine, captain: Path, trained: Path) -> None:
    job_id = trained.parent.name
    losses = [m.loss for m in engine.received if isinstance(m, JobUpdate) and m.job_id == job_id and m.loss is not None]
    job = spec(captain, trained.parent)
    rows = packing.load_encoded(captain, tokenizer.load(engine.model))
    plan = packing.epoch_plan([len(r.ids) for r in rows], job.micro_batch_tokens, seed=job.seed, epoch=0)
    batches = [[packing.build([rows[i] for i in pack], job.micro_batch_tokens)] for pack in plan[:1]]
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    plain = plain_loop.train(model, batches, rank=8, alpha=16, learning_rate=RATE, max_grad_norm=1.0, seed=0)
    assert losses[0] == pytest.approx(plain.losses[0], rel=1e-4)
    assert losses[5] < losses[0]


def test_the_adapter_predicts_the_data_set_better_than_the_base(engine: Engine, trained: Path, captain: Path) -> None:
    rows = packing.load_encoded(captain, tokenizer.load(engine.model))[:10]
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32).eval()

    def loss(of: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(
                np.mean(
                    [
                        F.cross_entropy(
                            of(torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0, :-1][row.trained[1:]],
                            torch.from_numpy(row.ids.astype(np.int64))[1:][row.trained[1:]],
                        ).item()
                        for row in rows
                    ]
                )
            )

    before = loss(model)
    assert loss(PeftModel.from_pretrained(model, str(trained))) < 0.8 * before


def test_the_adapter_is_one_thing_in_peft_in_plain_sglang_and_here(
    engine: Engine, trained: Path, plain_model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    with plain_sglang(engine.model, tmp_path / "plain.log") as plain:
        answer = engine.http.post("/load_lora_adapter", json={"lora_name": "captain", "lora_path": str(trained)})
        assert answer.json()["success"], answer.text
        here = generate_all(engine.http, prompts, "captain")
        assert here[:3] != generate_all(engine.http, prompts[:3], None)

        loaded = PeftModel.from_pretrained(plain_model, str(trained))
        for prompt, served in zip(prompts, here, strict=True):
            assert most_likely(loaded, prompt, served) == served
            assert len(served) == TOKENS or served[-1] == loaded.generation_config.eos_token_id
        loaded.unload()

        with httpx.Client(base_url=plain.url, timeout=120.0) as http:
            plain.wait(http)
            assert http.post("/load_lora_adapter", json={"lora_name": "c", "lora_path": str(trained)}).json()["success"]
            assert generate_all(http, prompts, "c") == here
    assert "hooks-of-harli: 0" in (tmp_path / "plain.log").read_text()


def generate_all(http: httpx.Client, prompts: list[list[int]], adapter: str | None) -> list[list[int]]:
    """Greedy tokens of all prompts, asked for at once."""
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS}}
    if adapter is not None:
        body["lora_path"] = [adapter] * len(prompts)
    answer = http.post("/generate", json=body)
    answer.raise_for_status()
    return [one["output_ids"] for one in answer.json()]


def most_likely(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[int]:
    """What the model finds most likely at each token of an answer, after those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    return list(logits.argmax(-1).tolist())


@dataclass
class PlainSGLang:
    """A process of SGLang without Harli, that may still be starting."""

    url: str
    process: subprocess.Popen[bytes]

    def wait(self, http: httpx.Client) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"plain SGLang did not start; exit status {self.process.poll()}")


@contextmanager
def plain_sglang(model: Path, log: Path) -> Iterator[PlainSGLang]:
    """Begins to start one; ends it."""
    (port,) = free_ports(1)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HARLI")}
    command = [sys.executable, "-m", "tests.serving.plain_sglang", str(model), str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)
    try:
        yield PlainSGLang(f"http://127.0.0.1:{port}", process)
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()


def test_an_adapter_is_a_model_to_openai_clients(engine: Engine, trained: Path) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]

    def ask(model: str) -> httpx.Response:
        return engine.http.post(
            "/v1/chat/completions",
            json={"model": model, "messages": messages, "temperature": 0, "max_tokens": TOKENS},
        )

    loaded = {m["id"] for m in engine.http.get("/v1/models").json()["data"]}
    assert "captain" in loaded
    base, adapter = ask(engine.model.name), ask("captain")
    assert base.status_code == adapter.status_code == 200
    assert base.json()["choices"][0]["message"]["content"] != adapter.json()["choices"][0]["message"]["content"]
    missing = ask("nobody")
    assert missing.status_code == 404 and "captain" in missing.text

    everyones, own = Target(kind="itl", ms=20_000.0), Target(kind="itl", ms=10_000.0, tenant="acme")
    engine.send(SetTargets(version=4, targets=(everyones, own), tenants={"captain": "acme"}))
    engine.until(lambda m: isinstance(m, Telemetry) and m.targets_version == 4)
    ask("captain")
    told = engine.until(lambda m: isinstance(m, Telemetry) and bool(m.tenant_itl))
    assert isinstance(told, Telemetry) and set(told.tenant_itl) == {"acme"}, "the adapter's tenant is told apart"


def test_served_tokens_do_not_depend_on_a_job_beside_them(
    engine: Engine, captain: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    alone = [engine.generate(prompt, 8) for prompt in prompts[:3]]
    engine.train_beside_decode(version=5)
    job = spec(captain, tmp_path / "beside", max_steps=5000)
    engine.run(job, token=3)
    engine.update("metric", job.job_id)
    assert [engine.generate(prompt, 8) for prompt in prompts[:3]] == alone
    told = engine.until(lambda m: isinstance(m, Telemetry) and m.decode_tokens > 0 and m.tasklets > 0)
    assert isinstance(told, Telemetry) and told.targets_version == 5
    engine.send(PauseJob(job_id=job.job_id, token=3))
    engine.update("paused", job.job_id)


def test_a_killed_engine_loses_no_more_than_the_steps_since_a_checkpoint(
    engine: Engine, captain: Path, tmp_path: Path
) -> None:
    job = spec(captain, tmp_path / "killed", max_steps=4, lora=LoraSpec(dropout=0.1))
    engine.run(job, token=11)
    checkpoint = engine.update("checkpoint", job.job_id)
    engine.update("metric", job.job_id)
    engine.kill()
    engine.pending.clear()
    engine.start()
    engine.run(job, token=12, resume_from=checkpoint.path)
    assert engine.update("started", job.job_id).step == 2
    path = engine.update("succeeded", job.job_id, 300).path
    assert path is not None
    resumed = load_file(Path(path) / "adapter_model.safetensors")

    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32).requires_grad_(False)
    rows = packing.load_encoded(captain, tokenizer.load(engine.model))
    undisturbed = Trainer(model, job, rows, base_name="plain")
    while not undisturbed.done:
        undisturbed.run_next()
    undisturbed.snapshot().save_adapter(tmp_path / "undisturbed")
    expected = load_file(tmp_path / "undisturbed/adapter_model.safetensors")
    difference = np.sqrt(sum(float((resumed[n] - expected[n]).square().sum()) for n in expected))
    size = np.sqrt(sum(float(w.square().sum()) for w in expected.values()))
    assert difference / size < 1e-3
