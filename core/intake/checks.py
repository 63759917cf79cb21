"""What a row must hold once it is a chat, and what is remarked of it: one code for the upload and for the look before
it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from core.errors import Invalid
from core.intake import chat, readers
from core.intake.chat import Encoded
from core.intake.columns import Columns
from core.intake.duplicates import Duplicates
from core.intake.findings import REASONS, Fault, Findings
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


def controls_of(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Finds a control token of the model in a text."""
    return re.compile("|".join(map(re.escape, tokenizer.special_texts)))


def remarks(found: Columns, controls: re.Pattern[str] | None) -> Iterator[tuple[str, int, str]]:
    """(code, row, what) of what is worth a warning in good rows."""
    last, blank = found.offsets[1:] - 1, found.blank()
    if blank.any():
        for at in np.flatnonzero(blank[last]).tolist():
            yield "empty_answer", at, ""
        for at in np.flatnonzero((np.diff(found.offsets) > 1) & blank[np.maximum(last - 1, 0)]).tolist():
            yield "empty_prompt", at, ""
    if controls is not None:
        for at in range(len(found)):
            if control := next((match for text in found.texts(at) if (match := controls.search(text))), None):
                yield "control_token", at, repr(control.group())


def remark_duplicates(findings: Findings, duplicates: Duplicates, place: Callable[[int, int | None], str]) -> None:
    """Count the rows that repeat an earlier one; place: of a line, in words."""
    for code, repeats in zip(("duplicate_rows", "duplicate_prompts"), duplicates.found(), strict=True):
        for line, earlier in repeats.examples:
            findings.add(code, place(line, None), f"as {place(earlier, None)}")
        if repeats.count > len(repeats.examples):
            findings.add(code, "", count=repeats.count - len(repeats.examples))
