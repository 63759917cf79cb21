"""What `harli simulate` and `harli whatif` do: policies over a trace, and the frontier at a given load."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from core.errors import Invalid, NotFound
from core.policy import POLICIES, bind
from core.policy.bound import BoundPolicy
from core.policy.types import WHOLE, Predictor
from core.predictor.profile import Profile
from core.predictor.two_stage import TwoStagePredictor
from core.simulate.device import Device, Program
from core.simulate.engine import Simulation
from core.simulate.measure import device_of, profile_device
from core.simulate.outcome import Outcome, Summary
from core.simulate.profile import read_profile, shipped
from core.simulate.scenario import FinetuneJob, Scenario
from core.workload.arrivals import Arrival
from core.workload.traces import cut, read_trace, thinned, within

Prefill = Literal["elsewhere", "here"]
TargetKind = Literal["itl", "tpot"]
MISS = 0.01  # share of steps that may outlast the bound that plans are made with
_WHATIF_STEPS = 400
_MEMORY_LIKE = "h200"


@dataclass(frozen=True, slots=True)
class Row:
    """A policy at a target."""

    policy: str
    target_ms: float
    knobs: dict[str, Any]
    summary: Summary


@dataclass(frozen=True, slots=True)
class Report:
    """A simulation of several policies and targets; `notes` say what was left out or fell back, and why."""

    trace: str
    device: str
    model: str
    seconds: float
    requests: int
    prefill: Prefill
    target_kind: TargetKind
    seed: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine decodes at present: running requests, their KV tokens, the longest of them (0: all alike)."""

    batch: int
    kv_tokens: int
    max_kv: int = 0


@dataclass(frozen=True, slots=True)
class Operating:
    """A point of the frontier: what a target costs and gives. ITL: None where nothing decodes; layout: the one that
    most steps ran in."""

    target_ms: float
    finetune_tokens_s: float
    exclusive_share: float
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    attainment: float
    layout: str


@dataclass(frozen=True, slots=True)
class Frontier:
    """Finetune throughput against the target at one load; `now` is the point at the present target, when one was
    given. solo_ms: the median step without finetuning."""

    device: str
    policy: str
    load: Load
    solo_ms: float
    exclusive_tokens_s: float
    points: tuple[Operating, ...]
    now: Operating | None
    notes: tuple[str, ...]


class Simulated(Protocol):
    """A device to simulate, a predictor as its engine has it, and what to tell people about both."""

    @property
    def device(self) -> Device: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def predictor(self) -> Predictor: ...


@dataclass(frozen=True, eq=False)
class Machine:
    """A simulated device, what `harli profile` would measure on it, and what to tell people about it."""

    device: Device
    profile: Profile
    notes: tuple[str, ...] = ()

    def predictor(self, miss: float = MISS) -> TwoStagePredictor:
        """A predictor as the engine starts with: fitted, nothing observed yet."""
        fresh: TwoStagePredictor = pickle.loads(_fitted(self, miss))
        return fresh


@cache
def _fitted(of: Machine, miss: float) -> bytes:
    """A fit takes seconds and a run needs a fresh one, so it is made once and copied."""
    return pickle.dumps(TwoStagePredictor(of.profile, miss))


@cache
def machine(name: str, layers: int = 32, micro_batch_tokens: int = 2048, kv_bytes_per_token: int = 131_072) -> Machine:
    """The device of that name, or of a file: one of the simulator's device profiles, or what `harli profile` wrote.

    A measured profile has no memory, prefill or noise; its arena is that of the H200 and a note says so. layers,
    micro_batch_tokens and kv_bytes_per_token (by default Llama-3-8B's) are what such a profile leaves open.
    Errors: `NotFound`, `Invalid` as for `core.simulate.profile.read_profile`.
    """
    path = Path(name)
    if name in shipped() or not path.is_file():
        device = Device(read_profile(name))
        return Machine(device, profile_device(device))
    try:
        measured = Profile.model_validate_json(path.read_bytes())
    except ValidationError:
        device = Device(read_profile(path))
        return Machine(device, profile_device(device))
    like = read_profile(_MEMORY_LIKE)
    made = device_of(
        measured, like, layers=layers, micro_batch_tokens=micro_batch_tokens, arena_pages=like.arena_pages,
        kv_bytes_per_token=kv_bytes_per_token,
    )  # fmt: skip
    note = (
        f"{path.name} was measured on {measured.machine.gpu} with {measured.machine.model}; it has no memory, noise or "
        f"prefill, so those are the {like.device}'s"
    )
    return Machine(Device(made), measured, (note,))


def simulate(
    trace: Path | Sequence[Arrival],
    device: str,
    policies: Sequence[str] = ("solo", "hybrid"),
    targets_ms: Sequence[float] = (),
    *,
    start_s: float = 0.0,
    seconds: float | None = None,
    every: int = 1,
    max_tokens: int | None = None,
    target_kind: TargetKind = "itl",
    prefill: Prefill = "elsewhere",
    jobs: tuple[FinetuneJob, ...] = (FinetuneJob("job"),),
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[Report, Outcome]:
    """Run each policy at each target over a trace (or `seconds` of it from `start_s`, every `every`-th request,
    requests up to `max_tokens`). Without targets: 1.5, 2 and 4 times the solo run's p99. Answers the report and all of
    its last run.

    Errors: those of `read_trace`, `machine` and `Scenario`; `NotFound` for a policy that does not exist.
    """
    began = time.perf_counter()
    chosen = [policy(name) for name in policies]
    simulated = machine(device)
    arrivals = read_trace(trace) if isinstance(trace, Path) else list(trace)
    if not arrivals:
        raise Invalid("trace_empty", "the trace has no requests; give one with at least one", "trace")
    length = seconds or arrivals[-1].time_s - start_s + 1.0
    limit = min(max_tokens or simulated.device.kv_tokens, simulated.device.kv_tokens - 4)
    part = within(asked := cut(thinned(arrivals, every), start_s, length), limit)
    notes = [*simulated.notes]
    if len(part) < len(asked):
        notes.append(f"{len(asked) - len(part)} of {len(asked)} requests have over {limit} tokens and were left out")
    if not part:
        raise Invalid(
            "trace_empty", f"no requests from {start_s} s on for {length} s; choose another part of the trace", "start"
        )

    def run(one: BoundPolicy, target_ms: float) -> Outcome:
        scenario = Scenario(part, length, target_ms, target_kind, jobs, prefill, seed=seed)
        return Simulation(scenario, simulated.device, one, simulated.predictor()).run()

    solo = run(bind("solo"), targets_ms[0] if targets_ms else 1e9).summary()
    targets = tuple(targets_ms) or tuple(round(x * solo.itl_p99_ms, 2) for x in (1.5, 2, 4))
    rows = []
    for one in chosen:
        for target_ms in targets:
            if progress:
                progress(one.name, target_ms)
            knobs = asdict(one.knobs) if one.knobs is not None else {}
            last = run(one, target_ms)
            rows.append(Row(one.name, target_ms, knobs, last.summary()))
    for target_ms in targets:
        if target_ms < solo.itl_p50_ms:
            notes.append(
                f"a target of {target_ms:g} ms is under the solo step's median of {solo.itl_p50_ms:.2f} ms: no policy "
                "can hold it, and those with a predictor fall back to solo"
            )
    report = Report(
        trace.name if isinstance(trace, Path) else "synthetic", simulated.device.profile.device,
        simulated.device.profile.model, length, len(part), prefill, target_kind, seed, tuple(rows), tuple(notes),
        time.perf_counter() - began,
    )  # fmt: skip
    return report, last


def whatif(
    load: Load,
    device: str | Simulated,
    targets_ms: Sequence[float],
    *,
    policy_name: str = "hybrid",
    now_ms: float | None = None,
    margin: float = 0.0,
) -> Frontier:
    """What finetuning would get at each target under a load that stays as it is; 400 steps are simulated a target.
    margin: the share of each target that is not planned with, as the engine is set to.

    Errors: as `simulate`; `Invalid` for a load that the device cannot hold or a target that is not above zero.
    """
    simulated = machine(device) if isinstance(device, str) else device
    one = policy(policy_name)
    dev = simulated.device
    room = dev.kv_tokens - (load.batch + 1) * _WHATIF_STEPS * 2
    if not 0 <= load.batch <= dev.max_batch or not load.batch <= load.kv_tokens <= max(room, 0):
        raise Invalid(
            "load",
            f"load: {load.batch} requests with {load.kv_tokens} KV tokens; {dev.profile.device} holds up to "
            f"{dev.max_batch} requests, each with a token, and {room} KV tokens with so many",
            "load",
        )
    notes = list(simulated.notes)
    longest = load.max_kv or load.kv_tokens // max(load.batch, 1)
    solo_ms = dev.cell(WHOLE, dev.padded(load.batch), load.kv_tokens, longest).alone_ms if load.batch else 0.0
    asked = sorted({*targets_ms, *([now_ms] if now_ms is not None else [])})
    points = {target_ms: _operate(simulated, one, load, target_ms, margin, solo_ms) for target_ms in asked}
    under = [target_ms for target_ms in asked if target_ms < solo_ms]
    if under:
        notes.append(
            f"targets up to {max(under):g} ms are under the solo step's {solo_ms:.2f} ms at this load: nothing can "
            "hold them and finetuning stands still"
        )
    exclusive = Program(dev)
    return Frontier(
        dev.profile.device, one.name, load, solo_ms,
        exclusive.tokens / exclusive.total_ms * dev.alone_speed(WHOLE) * 1e3,
        tuple(points[target_ms] for target_ms in sorted(set(targets_ms))),
        points[now_ms] if now_ms is not None else None, tuple(notes),
    )  # fmt: skip


def policy(name: str) -> BoundPolicy:
    """A policy with its default knobs; `NotFound` names those that exist."""
    if name not in POLICIES:
        raise NotFound("no_policy", f"{name}: no such policy; there are {', '.join(POLICIES)}", "policy")
    return bind(name)


def endless(load: Load, steps: int) -> list[Arrival]:
    """Requests that make up the load from the start on and outlast so many steps."""
    if not load.batch:
        return []
    longest = load.max_kv or load.kv_tokens // load.batch
    others = max(1, (load.kv_tokens - longest) // (load.batch - 1)) if load.batch > 1 else 0
    return [Arrival(0.0, longest, steps + 2), *[Arrival(0.0, others, steps + 2)] * (load.batch - 1)]


def _operate(
    simulated: Simulated, one: BoundPolicy, load: Load, target_ms: float, margin: float, solo_ms: float
) -> Operating:
    planned = target_ms * (1 - margin)
    seconds = _WHATIF_STEPS * max(planned if load.batch else 10.0, solo_ms) / 1e3
    scenario = Scenario(endless(load, int(seconds * 1e3 / max(solo_ms, 1.0))), seconds, planned)
    outcome = Simulation(scenario, simulated.device, one, simulated.predictor()).run()
    found, steps = outcome.summary(), outcome.steps
    tokens = sum(steps.batch)
    held = sum(size for gap, size in zip(steps.gap_ms, steps.batch, strict=True) if gap <= target_ms)
    return Operating(
        target_ms, found.finetune_tokens_s, found.exclusive_share,
        found.itl_p50_ms if tokens else None, found.itl_p99_ms if tokens else None,
        held / tokens if tokens else 1.0,
        str(max(set(steps.layout), key=steps.layout.count)) if steps.layout else str(WHOLE),
    )  # fmt: skip
