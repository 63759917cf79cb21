"""What the modules of the command `harli` share: options, the settings, a client."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from core.config import Settings
from core.errors import Invalid

if TYPE_CHECKING:
    from core.client import Client

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
Named = Annotated[str, typer.Argument(metavar="NAME")]
# Signs that a terminal obeys: control characters, and those that turn the direction of writing.
_OBEYED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def plain(text: str) -> str:
    """Text that others wrote, for a terminal: what it would obey is spelt out."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def settings() -> Settings:
    """The settings; Invalid names the variable or the file at fault."""
    try:
        return Settings()
    except tomllib.TOMLDecodeError as error:
        raise Invalid("settings", f"harli.toml cannot be read: {error}", "harli.toml") from error
    except ValidationError as error:
        faults = [
            f"HARLI_{'__'.join(str(part) for part in fault['loc']).upper()} (or harli.toml): {fault['msg']}"
            f", got {fault['input']!r}"
            for fault in error.errors(include_url=False)
        ]
        raise Invalid("settings", "; ".join(faults)) from error


@contextmanager
def connected() -> Iterator[Client]:
    """A client of the running API. Raises Unavailable when there is none."""
    from core.client import connect

    with connect(settings().api_url) as client:
        yield client


def pair(text: str) -> tuple[str, str]:
    """``ROLE=COLUMN`` as the two."""
    role, equals, column = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not ROLE=COLUMN, as in prompt=question")
    return role, column
