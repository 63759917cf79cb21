"""A conversation with one model, streamed in a thread of its own, so that two run side by side and the page stays
usable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from core.api.schemas import Message
from core.client import ChatReply, ChatStream
from core.errors import HarliError

Send = Callable[[list[Message], str | None, dict[str, Any]], ChatStream]


@dataclass
class Turn:
    """A question and, as it comes, the answer. The thread that streams it is its only writer."""

    question: str
    answer: str = ""
    reply: ChatReply | None = None
    error: HarliError | None = None
    stopped: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass
class Conversation:
    """All turns with one model."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.turns) and not self.turns[-1].done.is_set()

    def messages(self, system: str) -> list[Message]:
        """What the model is sent: the finished turns and the open question. A turn that failed is left out."""
        sent = [Message(role="system", content=system)] if system.strip() else []
        for turn in self.turns:
            if turn.error is not None and turn.done.is_set():
                continue
            sent.append(Message(role="user", content=turn.question))
            if turn.done.is_set():
                sent.append(Message(role="assistant", content=turn.answer))
        return sent

    def ask(self, question: str, model: str | None, system: str, sampling: dict[str, Any], send: Send) -> Turn:
        """Add a question and start streaming its answer."""
        turn = Turn(question)
        self.turns.append(turn)
        messages = self.messages(system)
        threading.Thread(
            target=_stream, args=(turn, lambda: send(messages, model, sampling)), name="playground", daemon=True
        ).start()
        return turn

    def halt(self) -> None:
        """End the answer that is streaming; what has come of it stays."""
        if self.turns:
            self.turns[-1].stop.set()


def _stream(turn: Turn, open_stream: Callable[[], ChatStream]) -> None:
    try:
        stream = open_stream()
        for piece in stream:
            turn.answer += piece
            if turn.stop.is_set():
                # Leaving the stream closes its connection, which ends the generation in the engine.
                turn.stopped = True
                break
        turn.reply = stream.reply
    except HarliError as error:
        turn.error = error
    finally:
        turn.done.set()
