"""What routes ask for: who asks, the services' context as that one may see it, pages, an upload's name."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from core.api.answers import Answers, Key, key
from core.api.gate import describe
from core.api.schemas import NAME
from core.control.context import Control
from core.control.principal import Principal


# Not one of these waits, so that none needs a thread.
async def _answers(request: Request) -> Answers:
    answers: Answers = request.app.state.answers
    return answers


async def _answer_key(request: Request) -> Key:
    return key(request.state.principal, request.scope)


async def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


async def _control(request: Request) -> Control:
    control: Control = request.app.state.control
    actor = request.state.actor
    if actor is not None:
        describe(actor, request.scope)
    return control.of(request.state.principal, actor)


AnswersDep = Annotated[Answers, Depends(_answers)]
AnswerKey = Annotated[Key, Depends(_answer_key)]
PrincipalDep = Annotated[Principal, Depends(_principal)]
# Its store shows what the request's principal may see, and writes what is changed to the audit log.
ControlDep = Annotated[Control, Depends(_control)]
Limit = Annotated[int, Query(ge=1, le=500, description="rows of a page")]
Cursor = Annotated[str | None, Query(max_length=200, description="`next` of the page before")]
NewName = Annotated[
    str, Query(pattern=NAME, description="lower-case letters, digits, dots, dashes, underscores; at most 63")
]
NewVersion = Annotated[bool, Query(description="store it as the next version of a name that is taken")]
Name = Annotated[str, Path(max_length=120)]
After = Annotated[int, Query(ge=0, lt=2**63, description="only what has an id above this")]
