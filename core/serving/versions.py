"""The SGLang version that the hooks were written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from core.errors import Unavailable

SGLANG = "0.5.16"


def require_sglang() -> None:
    """Raise `Unavailable` unless the installed SGLang is the one whose inner parts the hooks know."""
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise Unavailable("sglang_missing", f"SGLang is not installed; install sglang=={SGLANG}", "sglang") from error
    if found != SGLANG:
        raise Unavailable(
            "sglang_version",
            f"SGLang {found} is installed and Harli's hooks were written for {SGLANG}; install sglang=={SGLANG}",
            "sglang",
        )


def versions() -> dict[str, str]:
    """Versions worth reporting, by package."""
    found = {}
    for name in ("harli", "sglang", "torch", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
