"""Chats → token ids and the mask of the tokens that the loss counts.

The mask covers each answer of the assistant from the first token that the model would have generated after the
template's generation prompt to the token that ends the turn, that one included, so that the model learns to stop. The
answers are found by rendering: what the template writes for the messages before an answer, ready for generation, must
be how the whole chat begins. Nothing is assumed about a template's words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import Invalid
from core.intake.tokenizer import Messages, Span, Tokenizer, Tokens, Tools

TEXT_ROLE = "text"


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One row. ids: int32 [n]; trained: bool [n], whether the loss counts the prediction *of* that token."""

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Answer:
    """Where an answer lies in the rendered chat: `start`, first character after the generation prompt; `content_end`,
    first character after its words; `end`, first character of what the template writes for the next message. `calls`:
    it calls tools. `counted`: the loss counts it (an OpenAI message may say ``weight: 0``)."""

    start: int
    content_end: int
    end: int
    calls: bool
    counted: bool


def encode(tokenizer: Tokenizer, messages: Messages, tools: Tools | None = None) -> Encoded:
    """Tokens of one row under the model's own template; `tools` are those that the row offers to the model.

    A row of the single role ``text`` is plain text: BOS and EOS are the tokenizer's, the loss counts everything.
    Raises Invalid when the template refuses the chat, leaves out its tools, or writes an answer differently after its
    generation prompt.
    """
    return encode_many(tokenizer, [messages], [tools])[0]


def encode_many(
    tokenizer: Tokenizer, rows: Sequence[Messages], tools: Sequence[Tools | None] | None = None
) -> list[Encoded]:
    """`encode` for many rows (and the tools of each); tokenising runs in the tokenizer's own threads."""
    plain = [index for index, messages in enumerate(rows) if _is_text(messages)]
    chats = [index for index, messages in enumerate(rows) if not _is_text(messages)]
    encoded: dict[int, Encoded] = {}
    for index, ids in zip(plain, tokenizer.encode_documents([rows[i][0]["content"] for i in plain]), strict=True):
        encoded[index] = Encoded(ids, np.ones(len(ids), dtype=np.bool_))
    located = [_locate(tokenizer, rows[index], tools[index] if tools is not None else None) for index in chats]
    for index, (text, answers), tokens in zip(
        chats, located, tokenizer.encode([text for text, _ in located]), strict=True
    ):
        encoded[index] = _mask(tokenizer, text, answers, tokens)
    return [encoded[index] for index in range(len(rows))]


def _is_text(messages: Messages) -> bool:
    return len(messages) == 1 and messages[0]["role"] == TEXT_ROLE


# ---- answers in the rendered text ------------------------------------------------------------------------------------


def _locate(tokenizer: Tokenizer, messages: Messages, tools: Tools | None) -> tuple[str, list[_Answer]]:
    _require_tools(tokenizer, messages, tools)
    text = tokenizer.render(messages, tools)
    answers = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render(messages[:index], tools, generation_prompt=True)
        if not text.startswith(prompt):
            if tokenizer.has_generation_tags:
                return _locate_by_tags(tokenizer, messages, tools)
            raise _not_a_prefix(index)
        start = len(prompt)
        end = len(text) if index == len(messages) - 1 else _end(tokenizer, messages, tools, index, text, start)
        answers.append(_answer(message, start, _content_end(text, start, end, message["content"]), end))
    return text, answers


def _answer(message: Mapping[str, Any], start: int, content_end: int, end: int) -> _Answer:
    return _Answer(start, content_end, end, bool(message.get("tool_calls")), message.get("weight") != 0)


def _require_tools(tokenizer: Tokenizer, messages: Messages, tools: Tools | None) -> None:
    """Raise Invalid when the template would leave out what the row says about tools."""
    used = {
        "calls of tools": any(message.get("tool_calls") for message in messages),
        "results of tools": any(message["role"] == "tool" for message in messages),
        "lists of tools": bool(tools),
    }
    if not any(used.values()):
        return
    written = tokenizer.tool_support
    lacking = [what for (what, is_used), known in zip(used.items(), written, strict=True) if is_used and not known]
    if lacking:
        raise Invalid(
            "tools",
            f"The chat template of {tokenizer.path.name} does not write {' and '.join(lacking)}, so the model would "
            "learn from chats that make no sense. Serve a model whose template knows tools, or remove these rows.",
            "messages",
        )


def _end(tokenizer: Tokenizer, messages: Messages, tools: Tools | None, index: int, text: str, start: int) -> int:
    """Where the answer `index`, one that others follow, ends in the text."""
    until = tokenizer.render(messages[: index + 1], tools)
    if text.startswith(until):
        return len(until)
    # Some templates write the last answer differently (they add an empty reasoning part, say), so the chat that ends
    # here is no beginning of the longer one. What the template writes behind the answer's words is the same, though.
    content = messages[index]["content"].strip()
    found = until.find(content, start)
    behind = until[found + len(content) :] if found >= 0 else ""
    position = text.find(content + behind, start) if behind else -1
    if position < 0:
        raise _not_a_prefix(index)
    return position + len(content) + len(behind)


def _content_end(text: str, start: int, end: int, content: str) -> int:
    """End of the answer's words; `start` where the template rewrote them."""
    words = content.strip()
    position = text.find(words, start, end)
    return position + len(words) if position >= 0 else start


def _locate_by_tags(tokenizer: Tokenizer, messages: Messages, tools: Tools | None) -> tuple[str, list[_Answer]]:
    text, spans = tokenizer.render_spans(messages, tools)
    answers = [message for message in messages if message["role"] == "assistant"]
    if len(spans) != len(answers):
        raise Invalid(
            "chat_template",
            f"The model's chat template marks {len(spans)} answers in a chat that has {len(answers)}. Correct its "
            "generation blocks.",
            "messages",
        )
    ends: list[int] = [start for start, _ in spans[1:]] + [len(text)]
    return text, [
        _answer(message, start, max(stop, _content_end(text, start, stop, message["content"])), end)
        for (start, stop), end, message in zip(spans, ends, answers, strict=True)
    ]


def _not_a_prefix(index: int) -> Invalid:
    return Invalid(
        "chat_template",
        f"The model's chat template writes message {index + 1}, an answer, differently from the prompt that it gives "
        "the model to continue, so its tokens are not those that the model would generate. Write the answer as the "
        "template expects it (with its reasoning part, say), or correct the template.",
        "messages",
    )


# ---- answers in the tokens -------------------------------------------------------------------------------------------


def _mask(tokenizer: Tokenizer, text: str, answers: Sequence[_Answer], tokens: Tokens) -> Encoded:
    if not all(_cut_as_served(tokenizer, text, answer.start, tokens) for answer in answers):
        tokens = _encode_in_pieces(tokenizer, text, [answer.start for answer in answers])
    ids, starts, _ = tokens
    trained = np.zeros(len(ids), dtype=np.bool_)
    for number, answer in enumerate(answers):
        first, rest, behind = (
            int(at) for at in np.searchsorted(starts, (answer.start, answer.content_end, answer.end))
        )
        # Calls of tools have control tokens of their own within the answer, so the last one ends it.
        stops = (at for at in range(rest, behind) if int(ids[at]) in tokenizer.stop_ids)
        closing = max(stops, default=None) if answer.calls else next(stops, None)
        if not answer.counted:
            continue
        trained[first : behind if closing is None else closing + 1] = True
        if closing is None and number == len(answers) - 1 and answer.end == len(text):
            ids, trained = _append_eos(tokenizer, ids, trained)
    return Encoded(ids, trained)


def _cut_as_served(tokenizer: Tokenizer, text: str, start: int, tokens: Tokens) -> bool:
    """Whether the tokens before `start` are those of the prompt alone, which is what the server gives the model.

    A control token separates what stands on its two sides, so it is enough to compare from the last one on.
    """
    ids, starts, ends = tokens
    first = int(np.searchsorted(starts, start))
    if first and ends[first - 1] > start:
        return False
    control = next((at for at in range(first - 1, -1, -1) if int(ids[at]) in tokenizer.special_ids), None)
    begin = 0 if control is None else int(starts[control])
    return tokenizer.segment_ids(text[begin:start]) == tuple(ids[control or 0 : first].tolist())


def _encode_in_pieces(tokenizer: Tokenizer, text: str, cuts: Sequence[int]) -> Tokens:
    """Tokens with a boundary at every cut, for an answer that begins with something its prompt would swallow.

    Each answer then follows the very tokens that end its prompt at the server; an earlier answer of the same chat keeps
    the tokens in which it was generated.
    """
    edges = [0, *cuts, len(text)]
    spans: list[Span] = list(pairwise(edges))
    pieces = tokenizer.encode([text[begin:end] for begin, end in spans])
    joined = Tokens(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.starts + begin for piece, (begin, _) in zip(pieces, spans, strict=True)]),
        np.concatenate([piece.ends + begin for piece, (begin, _) in zip(pieces, spans, strict=True)]),
    )
    if tokenizer.decode(joined.ids.tolist()) != tokenizer.decode(tokenizer.encode([text])[0].ids.tolist()):
        raise Invalid(
            "answer_boundary",
            "An answer begins with characters that the tokenizer joins with the end of the prompt (white space, as a "
            "rule). Remove them from the answer's beginning.",
            "messages",
        )
    return joined


def _append_eos(
    tokenizer: Tokenizer, ids: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """A template that does not close the last answer would leave the model without an example of stopping."""
    if tokenizer.eos_id is None:
        raise Invalid(
            "no_end_of_turn",
            f"Neither the chat template nor the tokenizer in {tokenizer.path} has a token that ends an answer, so the "
            "model could not learn to stop. Set eos_token in its tokenizer_config.json.",
            "model",
        )
    return np.append(ids, np.int32(tokenizer.eos_id)).astype(np.int32), np.append(trained, True)
