"""An engine's predictor and the profile that it is fitted to: read at the start, or taken then and kept.

A profile lies in a folder under the key of GPU, driver, model, engine version and dtype. While one is taken a mark lies
beside it, so that an engine that does not live through it starts without one the next time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from core.errors import HarliError, NotFound
from core.policy.types import Layout, Predictor
from core.predictor.moving import MovingPredictor
from core.predictor.profile import Machine, MicroBatch, Profile, cache_key, lacks, read_profile, write_profile
from core.predictor.two_stage import TwoStagePredictor
from core.runtime.profiling import Profiler

logger = logging.getLogger(__name__)

PROFILES = "profiles"  # the folder in the data directory
_MARK = ".attempt"


class ProfileStore:
    """The profile of one machine. reason: why the last `read` gave none."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self._folder = folder
        self.machine = machine
        self.path = folder / f"{cache_key(machine)}.json"
        self._mark = self.path.with_suffix(_MARK)
        self.reason = ""

    @property
    def may_take(self) -> bool:
        """No attempt is known that ended the engine."""
        return not self._mark.exists()

    def read(self, layouts: Sequence[Layout], captured: Sequence[int], micro_batch: MicroBatch) -> Profile | None:
        """The profile, if it is there and covers what this engine has."""
        self.reason = ""
        try:
            profile = read_profile(self.path, self.machine)
        except NotFound:
            self.reason = "this GPU has no profile"
        except HarliError as error:
            self.reason = error.message
        else:
            missing = lacks(profile, layouts, captured, micro_batch)
            if not missing:
                return profile
            self.reason = f"this GPU's profile was taken without {missing}"
        if not self.may_take:
            self.reason += "; the engine ended while it took one and does not try again before `harli profile`"
        return None

    def begin(self) -> None:
        """A profile is being taken."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mark.touch()

    def end(self, profile: Profile | None) -> None:
        """It was taken, or given up in order."""
        if profile is not None:
            write_profile(profile, self._folder)
        self._mark.unlink(missing_ok=True)


def forget(folder: Path) -> list[Path]:
    """Remove all profiles, and the marks of attempts, so that each engine takes one at its next start; answers the
    profiles' paths."""
    profiles = sorted(folder.glob("*.json"))
    for path in [*profiles, *folder.glob(f"*{_MARK}")]:
        path.unlink()
    return profiles


class Profiling:
    """predictor: fitted to the stored profile; without one it learns from what it sees, with which finetuning gets the
    slack behind the steps only, until `finish` has one from the profiler. profiler: takes it meanwhile, None when that
    need not or cannot be. fallback: why there is no profile, empty when there is.

    batch_of: the number of the measured batch that these requests are, None when others are among them.
    """

    def __init__(
        self,
        store: ProfileStore,
        layouts: Sequence[Layout],
        captured: Sequence[int],
        micro_batch: MicroBatch,
        new_profiler: Callable[[], Profiler],
        batch_of: Callable[[Sequence[str]], int | None],
    ) -> None:
        self.predictor: Predictor = MovingPredictor()
        self.profiler: Profiler | None = None
        self.batch_of = batch_of
        self._store = store
        found = store.read(layouts, captured, micro_batch)
        self.fallback = store.reason
        if found is not None:
            self.predictor = TwoStagePredictor(found)
        elif store.may_take:
            profiler = new_profiler()
            if profiler.batches:
                store.begin()
                profiler.time_tasklets()
                self.profiler = profiler
            else:
                self.fallback += ", and its KV cache has no room for taking one"

    def finish(self) -> None:
        """All batches that the profiler wanted have been decoded: keep the profile and predict by it from now on."""
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        profiler.leave()
        try:
            profile = profiler.profile()
            self.predictor = TwoStagePredictor(profile)
        except (ValueError, HarliError) as error:
            self.fallback += f", and none could be taken: {error}"
            self._store.end(None)
            return
        self.fallback = ""
        self._store.end(profile)
        logger.warning("profile of this GPU, %d points: %s", len(profile.points), self._store.path)

    def close(self) -> None:
        """The engine ends in order."""
        if self.profiler is not None:
            self.profiler = None
            self._store.end(None)
