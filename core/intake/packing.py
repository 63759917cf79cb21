"""Rows → packed micro-batches of a fixed token count. Training and its preview run this very code.

Which rows share a micro-batch depends on the rows' lengths, the seed and the epoch alone, through a generator whose
raw output NumPy keeps stable, so a resumed run finds its place by the number of the micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from core.api import schemas
from core.errors import Invalid
from core.intake import chat, rows
from core.intake.chat import Encoded
from core.intake.tokenizer import Tokenizer

IGNORED = -100
"""The label that the loss skips, as torch's cross entropy has it."""
PADDING_SEGMENT = -1
EVALUATION_FRACTION: float = schemas.JobCreate.model_fields["evaluation_fraction"].default
WINDOW = 64
"""Micro-batches' worth of shuffled rows that are packed together; more fills them better and mixes them less."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """T = micro_batch_tokens positions: rows one behind the other, then padding.

    ids: int64[T], 0 in the padding; labels: int64[T], the next token where it is of the same row and trained, else
    -100; positions: int64[T], from 0 in each row (and in the padding); segments: int32[T], the row's place in the pack,
    -1 in the padding; tokens: positions that are not padding; trained: labels that are not -100.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    tokens: int
    trained: int


def shuffled(count: int, *, seed: int, stream: int) -> list[int]:
    """The numbers 0..count-1 in an order that (seed, stream) fix on every platform and NumPy version."""
    keys = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(count)
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order


def epoch_plan(lengths: Sequence[int], micro_batch_tokens: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of each micro-batch of an epoch: every row once, none cut, in an order of (seed, epoch).

    Best fit, longest first, over windows of the shuffled rows: long rows find company early, and which rows meet stays
    random. Raises Invalid when a row is longer than a micro-batch.
    """
    if len(lengths) and max(lengths) > micro_batch_tokens:
        row = int(np.argmax(lengths))
        raise Invalid(
            "row_too_long",
            f"Row {row} has {lengths[row]} tokens and a micro-batch {micro_batch_tokens}. Raise micro_batch_tokens to "
            f"{lengths[row]} or more, or shorten the row.",
            "micro_batch_tokens",
        )
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, number of the micro-batch), ascending
    # Even streams shuffle rows, odd ones the finished micro-batches.
    for window in _windows(shuffled(len(lengths), seed=seed, stream=2 * epoch), lengths, micro_batch_tokens):
        for row in sorted(window, key=lambda row: -lengths[row]):
            length = lengths[row]
            place = bisect_left(room, (length, -1))
            if place < len(room):
                left, number = room.pop(place)
            else:
                left, number = micro_batch_tokens, len(batches)
                batches.append([])
            batches[number].append(row)
            if left > length:
                insort(room, (left - length, number))
        room = room[-WINDOW:]
    # The last ones opened are the emptiest; they must not all come at the end of the epoch.
    return [batches[number] for number in shuffled(len(batches), seed=seed, stream=2 * epoch + 1)]


def _windows(order: Sequence[int], lengths: Sequence[int], micro_batch_tokens: int) -> Iterator[list[int]]:
    """The order cut into windows of about WINDOW micro-batches."""
    window: list[int] = []
    tokens = 0
    for row in order:
        window.append(row)
        tokens += lengths[row]
        if tokens >= WINDOW * micro_batch_tokens:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def build(pack: Sequence[Encoded], micro_batch_tokens: int) -> MicroBatch:
    """One micro-batch of the rows, in their order. Raises Invalid when they do not fit."""
    tokens = sum(len(row.ids) for row in pack)
    if tokens > micro_batch_tokens:
        raise Invalid(
            "pack_too_long",
            f"{len(pack)} rows of together {tokens} tokens do not fit a micro-batch of {micro_batch_tokens}. Take the "
            "rows of one micro-batch from epoch_plan.",
            "micro_batch_tokens",
        )
    ids = np.zeros(micro_batch_tokens, dtype=np.int64)
    labels = np.full(micro_batch_tokens, IGNORED, dtype=np.int64)
    positions = np.zeros(micro_batch_tokens, dtype=np.int64)
    segments = np.full(micro_batch_tokens, PADDING_SEGMENT, dtype=np.int32)
    begin = 0
    for segment, row in enumerate(pack):
        end = begin + len(row.ids)
        ids[begin:end] = row.ids
        labels[begin : end - 1] = np.where(row.trained[1:], row.ids[1:], IGNORED)
        positions[begin:end] = np.arange(end - begin)
        segments[begin:end] = segment
        begin = end
    positions[begin:] = np.arange(micro_batch_tokens - begin)
    return MicroBatch(ids, labels, positions, segments, tokens, int(np.count_nonzero(labels != IGNORED)))


def split(n_rows: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers (ascending) for training and for evaluation, disjoint and complete, fixed by the seed.

    With a fraction above 0 and two rows or more, each side gets at least one. Raises Invalid for a fraction outside
    [0, 1).
    """
    if not 0 <= fraction < 1:
        raise Invalid(
            "evaluation_fraction",
            f"evaluation_fraction is {fraction}; it must be at least 0 and below 1.",
            "evaluation_fraction",
        )
    held_out = min(max(round(n_rows * fraction), 1), n_rows - 1) if fraction > 0 and n_rows >= 2 else 0
    # A stream that no epoch uses.
    order = shuffled(n_rows, seed=seed, stream=2**64 - 1)
    return sorted(order[held_out:]), sorted(order[:held_out])


def load_encoded(path: Path, tokenizer: Tokenizer) -> list[Encoded]:
    """Every row of a normalised data set, encoded, in order. About 5 bytes a token.

    The rows are those that intake encoded; where that was done with another tokenizer they are encoded anew, which
    takes some 50 µs of Python a row.
    """
    stored = rows.encoded(path, tokenizer)
    if stored is not None:
        return stored
    encoded: list[Encoded] = []
    for chunk in rows.chunks(path):
        encoded += chat.encode_many(tokenizer, [row.messages for row in chunk], [row.tools for row in chunk])
    return encoded


def encoded_rows(path: Path, tokenizer: Tokenizer, indices: Sequence[int]) -> list[Encoded]:
    """Some rows as `load_encoded` gives them, in the order asked for."""
    stored = rows.encoded(path, tokenizer, indices)
    if stored is not None:
        return stored
    chats = rows.take(path, indices)
    return chat.encode_many(tokenizer, [row.messages for row in chats], [row.tools for row in chats])


def check_lengths(path: Path, lengths: Sequence[int], *, micro_batch_tokens: int, sequence_length: int) -> None:
    """Raise Invalid, naming row and line, when a row is longer than a sequence or a micro-batch may be."""
    longest = int(np.argmax(lengths)) if len(lengths) else 0
    limit, name = min((sequence_length, "sequence_length"), (micro_batch_tokens, "micro_batch_tokens"))
    if len(lengths) and lengths[longest] > limit:
        raise Invalid(
            "row_too_long",
            f"Row {longest} (line {rows.line(path, longest)} of the file) has {lengths[longest]} tokens, {name} is "
            f"{limit}. Raise {name} to {lengths[longest]} or more, or shorten the row.",
            name,
        )


def preview(
    path: Path,
    tokenizer: Tokenizer,
    *,
    micro_batch_tokens: int,
    sequence_length: int,
    seed: int,
    evaluation_fraction: float = EVALUATION_FRACTION,
) -> schemas.PackedPreview:
    """The first micro-batch of the first epoch, exactly as a job with these settings trains on it.

    Reads that micro-batch's rows only where the data set was encoded by this tokenizer. Raises Invalid
    when a row is too long or there is none.
    """
    lengths = rows.lengths(path, tokenizer)
    if lengths is None:
        lengths = [len(row.ids) for row in load_encoded(path, tokenizer)]
    check_lengths(path, lengths, micro_batch_tokens=micro_batch_tokens, sequence_length=sequence_length)
    training, _ = split(len(lengths), evaluation_fraction, seed)
    plan = epoch_plan([lengths[row] for row in training], micro_batch_tokens, seed=seed, epoch=0)
    if not plan:
        raise Invalid(
            "no_rows", f"{path.name} has no rows to train on. Upload a data set with at least one.", "dataset"
        )
    pack = encoded_rows(path, tokenizer, [training[at] for at in plan[0]])
    batch = build(pack, micro_batch_tokens)
    trained = np.concatenate([row.trained & (np.arange(len(row.ids)) > 0) for row in pack])
    return schemas.PackedPreview(
        micro_batch_tokens=micro_batch_tokens,
        segments=len(pack),
        padding=micro_batch_tokens - batch.tokens,
        trained_tokens=batch.trained,
        micro_batches_per_epoch=len(plan),
        tokens=_shown(tokenizer, batch.ids[: batch.tokens], batch.segments[: batch.tokens], trained),
    )


def _shown(
    tokenizer: Tokenizer, ids: npt.NDArray[Any], segments: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_]
) -> list[schemas.PackedToken]:
    return [
        schemas.PackedToken(text=tokenizer.decode([token]), segment=segment, trained=counted)
        for token, segment, counted in zip(ids.tolist(), segments.tolist(), trained.tolist(), strict=True)
    ]


def rendered(path: Path, tokenizer: Tokenizer, offset: int, limit: int) -> list[schemas.RenderedRow]:
    """Rows `offset` to `offset + limit` as the chat template writes them, token by token with the loss mask."""
    indices = range(max(offset, 0), min(max(offset, 0) + limit, rows.count(path)))
    return [
        schemas.RenderedRow(
            index=index,
            tokens=_shown(
                tokenizer, row.ids, np.zeros(len(row.ids), np.int32), row.trained & (np.arange(len(row.ids)) > 0)
            ),
        )
        for index, row in zip(indices, encoded_rows(path, tokenizer, indices), strict=True)
    ]
