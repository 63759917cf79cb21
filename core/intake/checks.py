"""What a row must hold once it is a chat: one code for the upload and for the look before it."""

from __future__ import annotations

from core.errors import Invalid
from core.intake import chat, readers
from core.intake.chat import Encoded
from core.intake.findings import REASONS, Fault
from core.intake.rows import Chat
from core.intake.shapes import Row
from core.intake.tokenizer import Tokenizer

OF_THE_MODEL = {"no_chat_template", "no_end_of_turn"}
"""Codes of what is wrong with the model and so with every row, which no row is blamed for."""


def encoding_fault(row: Row) -> Fault | None:
    """What is wrong with a row whose text is not Unicode; readers let such bytes through as lone surrogates."""
    beside = [text for extra in row.extras or () for text in extra if isinstance(text, str)]
    return readers.encoding_fault("".join((*row.contents, *beside, row.tools or "")))


def encoded(row: Chat, tokenizer: Tokenizer) -> Encoded | Fault:
    """The row's tokens, or why its chat template does not take the row. Raises Invalid for what is `OF_THE_MODEL`."""
    try:
        return chat.encode(tokenizer, row.messages, row.tools)
    except Invalid as error:
        if error.code in OF_THE_MODEL:
            raise
        # Whoever tells it ends with the remedy.
        return Fault(error.code, error.message.removesuffix(REASONS[error.code].remedy).rstrip(". "))
