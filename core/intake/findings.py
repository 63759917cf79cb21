"""What is found wrong or worth saying about a file: counted per reason, with the first places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from core.api import schemas

EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a row cannot be used: a code of `REASONS` and what stood there (never the row's words)."""

    code: str
    what: str


@dataclass(frozen=True, slots=True)
class Reason:
    """A kind of finding: `what` heads the list of its places, `remedy` ends it."""

    level: Literal["error", "warning"]
    what: str
    remedy: str


REASONS = {
    "broken_json": Reason("error", "Not valid JSON", "Correct or remove it; in JSONL each line is one object."),
    "broken_csv": Reason("error", "Not valid CSV", 'Close every quote, and write a quote inside a field as "".'),
    "csv_fields": Reason("error", "Fields and header differ in number", "Quote fields that contain the delimiter."),
    "not_utf8": Reason("error", "Not UTF-8 text", "Convert the file to UTF-8."),
    "not_an_object": Reason("error", "Not an object", "Write each row as an object with named fields."),
    "missing_field": Reason("error", "Field missing", "Add the field, or map its role to another column."),
    "wrong_type": Reason("error", "Value of another type", "Give every row the same type in this field."),
    "not_text": Reason("error", "Content that is not text", "Remove images and audio; only text is trained on."),
    "unknown_role": Reason("error", "Unknown role", "Use system, user and assistant."),
    "role_sequence": Reason(
        "error",
        "Roles out of order",
        "After at most one system message user and assistant take turns, user first and assistant last; what tools "
        "answer follows the message that called them.",
    ),
    "tool_call": Reason(
        "error",
        "Call, result or list of tools in another form",
        "Write them as the OpenAI API does: tool_calls of {function: {name, arguments}}, results under the role tool.",
    ),
    "tools": Reason(
        "error",
        "Tools that the served model's chat template does not write",
        "Serve a model whose template knows tools, or remove these rows.",
    ),
    "chat_template": Reason("error", "Refused by the model's chat template", "Change or remove the row."),
    "answer_boundary": Reason(
        "error", "Answer that the tokenizer joins with its prompt", "Remove the white space before the answer."
    ),
    "long_rows": Reason(
        "warning",
        "Longer than a job's default micro-batch",
        "A job on it needs larger micro_batch_tokens; rows are never cut.",
    ),
    "duplicate_rows": Reason("warning", "Same as an earlier row", "Remove the copies unless the weight is meant."),
    "duplicate_prompts": Reason(
        "warning", "Same prompt as an earlier row, another answer", "Check that several answers are meant."
    ),
    "empty_answer": Reason("warning", "Empty answer", "It teaches the model to say nothing."),
    "empty_prompt": Reason("warning", "Empty prompt", "Check that the right column is mapped."),
    "number_as_text": Reason("warning", "Number where text is expected", "It was taken as it is written."),
    "control_token": Reason(
        "warning", "Text of one of the model's control tokens", "Remove it unless the token itself is meant."
    ),
    "unused_columns": Reason("warning", "Columns that are not used", "Map a role to those that matter."),
}


@dataclass(slots=True)
class _Count:
    count: int = 0
    examples: list[str] = field(default_factory=list)


class Findings:
    """Faults and warnings of one file, in the order in which their reasons first came up."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def add(self, code: str, place: str, what: str = "", count: int = 1) -> None:
        """Count a finding; the first three places of a reason are kept as examples, ``place: what``."""
        entry = self._counts.setdefault(code, _Count())
        entry.count += count
        if len(entry.examples) < EXAMPLES and place:
            entry.examples.append(f"{place}: {what}" if what else place)

    def has(self, code: str) -> bool:
        """Whether the reason came up."""
        return code in self._counts

    @property
    def errors(self) -> int:
        """Faults in all."""
        return sum(entry.count for code, entry in self._counts.items() if REASONS[code].level == "error")

    @property
    def first_error(self) -> tuple[str, str] | None:
        """Code and first place of the first reason that is an error."""
        return next(
            ((code, entry.examples[0]) for code, entry in self._counts.items() if REASONS[code].level == "error"), None
        )

    def counts(self) -> dict[str, int]:
        """Errors per code."""
        return {code: entry.count for code, entry in self._counts.items() if REASONS[code].level == "error"}

    def listed(self) -> list[schemas.Finding]:
        """For the report: errors first."""
        return sorted(
            (
                schemas.Finding(
                    code=code,
                    level=REASONS[code].level,
                    message=f"{REASONS[code].what}. {REASONS[code].remedy}",
                    count=entry.count,
                    examples=entry.examples,
                )
                for code, entry in self._counts.items()
            ),
            key=lambda finding: finding.level != "error",
        )
