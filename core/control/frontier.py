"""The live frontier: what to ask the simulator at the present load, and what people get of its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from math import floor, log10
from pathlib import Path
from typing import Any

from core.api import schemas
from core.control import targets, telemetry
from core.control.context import Control
from core.errors import HarliError
from core.predictor.profile import Profile, read_profile
from db import engines as engine_rows
from db import targets as target_rows
from db.base import now
from db.engines import EngineRecord

_WINDOW_S = 10.0
_STEPS = 12
_WIDEST = 8.0  # times the solo step
_DEFAULT_SPAN_MS = (8.0, 64.0)


@dataclass(frozen=True)
class Asked:
    """The question, or None when there is nothing to ask with; and the frontier without points."""

    question: dict[str, Any] | None
    empty: schemas.Frontier


def ask(control: Control) -> Asked:
    """What the simulator is to be asked now. Load and durations are rounded to two digits, so that a load that stays as
    it is keeps its answer."""
    with control.store.read() as session:
        record = engine_rows.current(session)
        if record is None or record.state != "ready":
            return _nothing("no engine is connected")
        itl_ms = targets.tightest_itl_ms(targets.in_force(target_rows.current(session), now())).get(None)
        window = telemetry.recent(control, session, _WINDOW_S)
        running = window.decode_tokens / max(window.decode_steps, 1) if window is not None else 0.0
        kv_tokens = window.kv_used if window is not None else 0
    batch = round(_rounded(running) if running > 10 else running)
    hello = record.hello
    basis = _basis(control, record)
    if isinstance(basis, str):
        return _nothing(basis)
    source, measured_at, known = basis
    solo_ms = hello.get("solo_itl_ms") or itl_ms
    low, high = (0.9 * solo_ms, _WIDEST * solo_ms) if solo_ms else _DEFAULT_SPAN_MS
    high = max(high, 1.5 * itl_ms) if itl_ms is not None else high
    question = {
        "batch": batch,
        "kv_tokens": int(max(_rounded(kv_tokens), batch)) if batch else 0,
        "targets_ms": [_rounded(low * (high / low) ** (step / _STEPS)) for step in range(_STEPS + 1)],
        "now_ms": itl_ms,
        "policy": hello.get("policy") or control.settings.finetune.policy or "tasklet_slices",
        "margin": hello["margin"],
        **known,
    }
    empty = schemas.Frontier(
        source=source, measured_at=measured_at, policy=question["policy"], margin=question["margin"],
        batch=question["batch"], kv_tokens=question["kv_tokens"],
    )  # fmt: skip
    return Asked(question, empty)


def answer(asked: Asked, found: dict[str, Any]) -> schemas.Frontier:
    """The simulator's answer for people."""
    return asked.empty.model_copy(
        update={
            "solo_ms": found["solo_ms"] or None,
            "exclusive_tokens_s": found["exclusive_tokens_s"],
            "points": [schemas.FrontierPoint.model_validate(point) for point in found["points"]],
            "now": schemas.FrontierPoint.model_validate(found["now"]) if found["now"] is not None else None,
            "notes": list(found["notes"]),
        }
    )


def _nothing(missing: str) -> Asked:
    return Asked(None, schemas.Frontier(source="none", missing=missing))


def _basis(control: Control, record: EngineRecord) -> tuple[Any, datetime | None, dict[str, Any]] | str:
    """What the simulated device is of: (source, when it was measured, fields of the question), or what is missing."""
    found = _profile(control, record.hello)
    if found is not None:
        path, profile = found
        measured_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return "profile", measured_at, {"profile": str(path), **_open_fields(control, record.hello, profile)}
    learnt = record.learnt
    if learnt is None:
        return (
            "this machine has no profile, and no finetune job has run long enough on this engine for it to know how "
            "long its tasklets take; both a decode step and an optimizer step must have been seen"
        )
    known = {
        "device": record.hello["device_name"],
        "model": record.hello["model"],
        "steps": [[size, _rounded(mean), _rounded(bound)] for size, mean, bound in learnt["steps"]],
        "tasklets": {kind: [_rounded(mean), _rounded(bound)] for kind, (mean, bound) in learnt["tasklets"].items()},
        "mix": {kind: _rounded(count) for kind, count in learnt["mix"].items()},
        "step_tokens": _rounded(learnt["step_tokens"]),
    }
    return "learnt", datetime.fromtimestamp(learnt["time"], UTC), known


def _profile(control: Control, hello: dict[str, Any]) -> tuple[Path, Profile] | None:
    """The newest profile of the engine's device and model."""
    found: list[tuple[Path, Profile]] = []
    for path in (control.data_dir / "profiles").glob("*.json"):
        try:
            profile = read_profile(path)
        except (HarliError, OSError):
            continue
        machine = profile.machine
        if (machine.gpu, machine.model, machine.dtype) == (hello["device_name"], hello["model"], hello["dtype"]):
            found.append((path, profile))
    return max(found, key=lambda pair: pair[0].stat().st_mtime, default=None)


def _open_fields(control: Control, hello: dict[str, Any], profile: Profile) -> dict[str, Any]:
    """What a profile leaves open: layers, tokens of a micro-batch, bytes of a KV token, from the model's own files."""
    fields: dict[str, Any] = {"micro_batch_tokens": control.settings.finetune.micro_batch_tokens}
    if profile.micro_batch is not None:
        fields["micro_batch_tokens"] = profile.micro_batch.tokens
    try:
        config = json.loads((Path(hello["model_path"]) / "config.json").read_text())
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        bytes_ = 4 if hello["dtype"] == "float32" else 2
        fields["layers"] = layers
        fields["kv_bytes_per_token"] = 2 * layers * config.get("num_key_value_heads", heads) * head * bytes_
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return fields


def _rounded(value: float) -> float:
    """To two significant digits."""
    if value <= 0:
        return value
    return round(value, 1 - floor(log10(value)))
