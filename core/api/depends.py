"""What routes ask for: the services' context, pages, an upload's name."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from core.api.schemas import NAME
from core.control.context import Control


def _control(request: Request) -> Control:
    control: Control = request.app.state.control
    return control


ControlDep = Annotated[Control, Depends(_control)]
Limit = Annotated[int, Query(ge=1, le=500, description="rows of a page")]
Cursor = Annotated[str | None, Query(max_length=200, description="`next` of the page before")]
NewName = Annotated[
    str, Query(pattern=NAME, description="lower-case letters, digits, dots, dashes, underscores; at most 63")
]
NewVersion = Annotated[bool, Query(description="store it as the next version of a name that is taken")]
Name = Annotated[str, Path(max_length=120)]
After = Annotated[int, Query(ge=0, lt=2**63, description="only what has an id above this")]
