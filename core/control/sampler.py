"""Has a job's prompts answered on the way: the adapter of an evaluation is loaded into the engine under a name of its
own, asked like any other, and unloaded. The engine treats these requests as it does everyone's, so that they cost
decode what a few short requests cost, and the training nothing.

What is to be sampled stands in the store; when evaluations come faster than answers, only the newest is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import httpx
from sqlalchemy.orm import Session

from core.control.context import Control
from core.control.lifecycle import remark
from db import changes, engines, samples
from db import jobs as rows
from db.base import now
from db.jobs import JobRecord
from db.samples import SampleRecord

logger = logging.getLogger(__name__)

# No adapter of a customer's begins like this.
PREFIX = "~sample~"
_LOAD_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 120.0

Write = Callable[[], AbstractContextManager[Session]]


class SampleRefused(Exception):
    """The engine does not take the adapter or the request; the message is its reason."""


class Sampler:
    """`write` opens a write transaction that fails once the dispatch lease is lost. `run` is for one thread."""

    def __init__(self, control: Control, write: Write) -> None:
        self._control = control
        self._write = write
        self._swept: str | None = None

    def run(self) -> None:
        """Have every waiting adapter answer."""
        with self._control.store.read() as session:
            engine = engines.current(session)
            if engine is None or engine.state != "ready":
                return
            waiting = rows.to_sample(session)
        with httpx.Client(base_url=str(engine.hello["http_url"]), timeout=_LOAD_TIMEOUT_S, trust_env=False) as http:
            try:
                if self._swept != engine.id:
                    self._sweep(http)
                    self._swept = engine.id
                for job in waiting:
                    self._sample(http, str(engine.hello["model"]), job)
            except httpx.TransportError as error:
                logger.info("engine %s does not answer about samples, they are asked for again: %s", engine.id, error)

    @staticmethod
    def _sweep(http: httpx.Client) -> None:
        """Unload what a dispatcher that ended in the middle left loaded."""
        answer = http.get("/v1/models")
        if answer.is_error:
            return
        for model in answer.json().get("data", []):
            if str(model["id"]).startswith(PREFIX):
                http.post("/unload_lora_adapter", json={"lora_name": model["id"]})

    def _sample(self, http: httpx.Client, model: str, job: JobRecord) -> None:
        step, path, name = job.sample_step, job.sample_path, f"{PREFIX}{job.id}"
        prompts: list[str] = job.spec["sample_prompts"]
        found: list[SampleRecord] = []
        failure: str | None = None
        try:
            _checked(http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": path}))
            for number, prompt in enumerate(prompts):
                answer, tokens = self._ask(http, f"{model}:{name}", prompt, int(job.spec["sample_tokens"]))
                found.append(
                    SampleRecord(
                        job_id=job.id, step=step, number=number, time=now(), prompt=prompt, answer=answer, tokens=tokens
                    )
                )
        except SampleRefused as error:
            failure = str(error)
        finally:
            http.post("/unload_lora_adapter", json={"lora_name": name})
        with self._write() as session:
            record = rows.find(session, job.id)
            if record is None:
                return
            if record.sample_step == step:
                record.sample_step = record.sample_path = None
            if failure is not None:
                remark(session, record, "samples_failed", f"no samples of step {step}: {failure}")
                return
            samples.put(session, found)
            count = "1 prompt" if len(found) == 1 else f"{len(found)} prompts"
            remark(session, record, "samples", f"{count} answered by the adapter of step {step}")
            changes.add(session, "jobs", "sampled", job.id, tenant=job.tenant, state=record.state, step=step)

    @staticmethod
    def _ask(http: httpx.Client, model: str, prompt: str, tokens: int) -> tuple[str, int | None]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            # The same question at every step: what changes is the adapter, not the dice.
            "temperature": 0.0,
        }
        answer = _checked(http.post("/v1/chat/completions", json=body, timeout=_ANSWER_TIMEOUT_S)).json()
        return answer["choices"][0]["message"]["content"] or "", (answer.get("usage") or {}).get("completion_tokens")


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_error:
        raise SampleRefused(answer.text[:300])
    return answer
