"""Chats as Arrow columns: what the normalised file is made of, and what can be told of many rows at once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from core.intake import rows
from core.intake.rows import Chat
from core.intake.shapes import Chats, Extra

Int64s = npt.NDArray[np.int64]
# An odd number beyond 2^63, so that the hash of a row depends on the order of its messages.
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows: `offsets[i]` to `offsets[i + 1]` are the messages of row i. roles, contents: strings, one per message;
    extras: an array per field of `Extra`, None when no message has any; tools: JSON per row, None when no row has any.
    """

    offsets: npt.NDArray[np.int32]
    roles: pa.Array
    contents: pa.Array
    extras: tuple[pa.Array, ...] | None = None
    tools: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def stored(self) -> tuple[pa.Array, pa.Array]:
        """The columns messages and tools of the normalised file."""
        extras = self.extras or tuple(_nulls(len(self.roles)))
        messages = pa.StructArray.from_arrays([self.roles, self.contents, *extras], fields=list(rows.MESSAGE))
        messages = pa.ListArray.from_arrays(pa.array(self.offsets), messages, type=rows.SCHEMA.field("messages").type)
        return messages, self.tools if self.tools is not None else pa.nulls(len(self), pa.string())

    def chats(self) -> list[Chat]:
        """The rows as the chat template takes them."""
        messages = [
            {"role": role, "content": content}
            for role, content in zip(self.roles.to_pylist(), self.contents.to_pylist(), strict=True)
        ]
        for name, values in zip(Extra._fields, self.extras or (), strict=False):
            for at in np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False)):
                value = values[int(at)].as_py()
                messages[at][name] = json.loads(value) if name == "tool_calls" else value
        edges = self.offsets.tolist()
        listed = self.tools.to_pylist() if self.tools is not None else [None] * len(self)
        return [
            Chat(messages[begin:end], json.loads(tools) if tools else None)
            for begin, end, tools in zip(edges[:-1], edges[1:], listed, strict=True)
        ]

    def texts(self, row: int) -> list[str]:
        """All that is said in a row, its last message last."""
        begin, end = int(self.offsets[row]), int(self.offsets[row + 1])
        said: list[str] = self.contents.slice(begin, end - begin).to_pylist()
        calls = self.extras[0].slice(begin, end - begin).to_pylist() if self.extras is not None else []
        tools = [self.tools[row].as_py()] if self.tools is not None else []
        return [text for text in (*tools, *calls) if text] + said

    def chosen(self, keep: npt.NDArray[np.bool_]) -> Columns:
        """The rows for which `keep` holds."""
        sizes = np.diff(self.offsets)
        of_message = pa.array(np.repeat(keep, sizes))
        return Columns(
            np.concatenate([[0], np.cumsum(sizes[keep])]).astype(np.int32),
            self.roles.filter(of_message),
            self.contents.filter(of_message),
            tuple(values.filter(of_message) for values in self.extras) if self.extras is not None else None,
            self.tools.filter(pa.array(keep)) if self.tools is not None else None,
        )

    def bytes(self) -> Int64s:
        """UTF-8 bytes of each row's contents."""
        lengths = pc.binary_length(self.contents).to_numpy(zero_copy_only=False).astype(np.int64)
        return np.diff(np.concatenate([[0], np.cumsum(lengths)])[self.offsets])

    def blank(self) -> npt.NDArray[np.bool_]:
        """Whether each message has nothing but white space, and calls no tool."""
        blank = pc.or_(pc.utf8_is_space(self.contents), pc.equal(pc.binary_length(self.contents), 0))
        if self.extras is not None:
            blank = pc.and_(blank, self.extras[0].is_null())
        found: npt.NDArray[np.bool_] = blank.to_numpy(zero_copy_only=False)
        return found

    def hashes(self) -> tuple[Int64s, Int64s]:
        """64 bits of each row, and of each row without its last message (where it has others)."""
        if not len(self):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        of_message = _hashed(self.contents)
        if self.extras is not None:
            of_message = of_message ^ (_hashed(self.extras[0].fill_null("")) * _STEP)
        starts, sizes = self.offsets[:-1], np.diff(self.offsets)
        places = np.arange(len(of_message)) - np.repeat(starts, sizes)
        powers = np.cumprod(np.full(int(sizes.max()), _STEP, dtype=np.uint64), dtype=np.uint64)
        of_message = of_message * powers[places]
        whole = np.add.reduceat(of_message, starts)
        if self.tools is not None:
            whole = whole + _hashed(self.tools.fill_null(""))
        last = self.offsets[1:] - 1
        prompts = np.where(sizes > 1, whole - of_message[last], whole)
        return whole.view(np.int64), prompts.view(np.int64)


def of_chats(chats: Chats) -> Columns | None:
    """The same of Python's texts; None when one is not Unicode."""
    offsets = np.zeros(len(chats.sizes) + 1, dtype=np.int32)
    np.cumsum(chats.sizes, out=offsets[1:])
    try:
        roles, contents = (pa.array(texts, pa.string()) for texts in (chats.roles, chats.contents))
        extras = None
        if chats.extras is not None:
            extras = tuple(
                pa.array([extra[at] for extra in chats.extras], rows.MESSAGE.field(name).type)
                for at, name in enumerate(Extra._fields)
            )
        tools = pa.array(chats.tools, pa.string()) if chats.tools is not None else None
    except UnicodeEncodeError:
        return None
    return Columns(offsets, roles, contents, extras, tools)


def _nulls(count: int) -> list[pa.Array]:
    return [pa.nulls(count, rows.MESSAGE.field(name).type) for name in Extra._fields]


def _hashed(texts: pa.Array) -> npt.NDArray[np.uint64]:
    found: npt.NDArray[np.uint64] = pl.Series(values=texts).hash(1).to_numpy()
    return found


class ContentHash:
    """SHA-256 of rows, whatever the format and the blocks in which they came."""

    def __init__(self) -> None:
        # One for each stream of values: what it gets does not depend on where blocks begin.
        self._sizes, self._more = hashlib.sha256(), hashlib.sha256()
        self._lengths, self._texts = ([hashlib.sha256(), hashlib.sha256()] for _ in range(2))
        self._rows = self._messages = 0

    def add(self, columns: Columns) -> None:
        self._sizes.update(np.diff(columns.offsets).tobytes())
        for part, lengths, text in zip((columns.roles, columns.contents), self._lengths, self._texts, strict=True):
            if len(part):
                ends = np.frombuffer(part.buffers()[1], np.int32)[part.offset : part.offset + len(part) + 1]
                lengths.update(np.diff(ends).tobytes())
                text.update(memoryview(part.buffers()[2] or b"")[ends[0] : ends[-1]])
        for name, values in zip(Extra._fields, columns.extras or (), strict=False):
            self._add_more(name, values, self._messages)
        if columns.tools is not None:
            self._add_more("tools", columns.tools, self._rows)
        self._rows += len(columns)
        self._messages += len(columns.roles)

    def _add_more(self, name: str, values: pa.Array, begin: int) -> None:
        for at in np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False)):
            value: Any = values[int(at)].as_py()
            self._more.update(f"{name} {begin + int(at)} {json.dumps(value)}\n".encode())

    def digest(self) -> str:
        parts = (self._sizes, self._more, *self._lengths, *self._texts)
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()
