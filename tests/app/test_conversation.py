"""A conversation: what is sent, what streams in, stopping, failing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from app.ui.conversation import Conversation
from core.api.schemas import Message
from core.client import ChatReply, ChatStream
from core.errors import Unavailable

REPLY = ChatReply("Aye!", "stop", 5, 2, 10.0, 20.0)


class Model:
    """Answers with its pieces, and remembers what it was sent."""

    def __init__(self, *pieces: str, gate: threading.Event | None = None) -> None:
        self.pieces, self.gate = pieces, gate
        self.sent: list[tuple[list[tuple[str, str]], str | None, dict[str, Any]]] = []
        self.left = threading.Event()

    def __call__(self, messages: list[Message], model: str | None, sampling: dict[str, Any]) -> ChatStream:
        self.sent.append(([(message.role, message.content) for message in messages], model, sampling))
        return ChatStream(self._stream())

    def _stream(self) -> Iterator[str | ChatReply]:
        try:
            for piece in self.pieces:
                yield piece
                if self.gate is not None:
                    self.gate.wait(30)
            yield REPLY
        finally:
            self.left.set()


def test_an_answer_streams_in_and_ends_with_its_figures() -> None:
    conversation, model = Conversation(), Model("Aye", "!")
    turn = conversation.ask("Who?", "captain", "", {"max_tokens": 8}, model)
    assert turn.done.wait(30)
    assert (turn.answer, turn.reply, conversation.busy) == ("Aye!", REPLY, False)
    assert model.sent == [([("user", "Who?")], "captain", {"max_tokens": 8})]


def test_what_was_said_is_sent_again() -> None:
    conversation, model = Conversation(), Model("Aye")
    for question in ("One?", "Two?"):
        assert conversation.ask(question, None, "Be brief.", {}, model).done.wait(30)
    assert model.sent[1][0] == [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "Aye"),
        ("user", "Two?"),
    ]


def test_stopping_keeps_what_has_come_and_leaves_the_stream() -> None:
    gate = threading.Event()
    conversation, model = Conversation(), Model("Aye", ", matey", "!", gate=gate)
    turn = conversation.ask("Who?", None, "", {}, model)
    assert conversation.busy
    conversation.halt()
    gate.set()
    assert turn.done.wait(30)
    assert turn.stopped
    assert turn.answer in ("Aye", "Aye, matey")
    assert model.left.wait(30), "the connection was left open"


def test_a_refusal_is_kept_with_its_turn_and_not_sent_again() -> None:
    def refuse(*_: Any) -> ChatStream:
        raise Unavailable("engine_unavailable", "the engine is absent", "model")

    conversation, model = Conversation(), Model("Aye")
    failed = conversation.ask("One?", None, "", {}, refuse)
    assert failed.done.wait(30)
    assert failed.error is not None
    assert conversation.ask("Two?", None, "", {}, model).done.wait(30)
    assert model.sent[0][0] == [("user", "Two?")]
