"""The normalised data set: a Parquet file that `dataset.ingest` writes and everything else reads.

Columns: messages (list of {role, content} with tool_calls, name, tool_call_id and weight where they apply), tools
(those that the row offers), line (where the row began in the uploaded file, from 1), and, under the tokenizer whose
fingerprint the file's metadata hold (null when it was written without one): tokens and answer_tokens, their numbers;
input_ids and trained, the row as training takes it. tool_calls and tools are JSON in the OpenAI form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.api import schemas
from core.errors import NotFound
from core.intake.chat import Encoded
from core.intake.tokenizer import Tokenizer

MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), False),
        pa.field("content", pa.string(), False),
        pa.field("tool_calls", pa.string()),
        pa.field("name", pa.string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("weight", pa.int8()),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("messages", pa.list_(MESSAGE), False),
        pa.field("tools", pa.string()),
        pa.field("line", pa.int64(), False),
        pa.field("tokens", pa.int32()),
        pa.field("answer_tokens", pa.int32()),
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("trained", pa.list_(pa.bool_())),
    ]
)
FINGERPRINT = b"harli.tokenizer"
_CHAT = ["messages", "tools"]


class Chat(NamedTuple):
    """A row as the chat template takes it: messages (only with the fields that they have), and its tools or None."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise NotFound(
            "dataset_file_missing", f"There is no data set file {path}. Upload the data set again.", "dataset"
        )
    return pq.ParquetFile(path)


def count(path: Path) -> int:
    """Number of rows."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def _tables(file: pq.ParquetFile, indices: Sequence[int], columns: list[str]) -> Iterator[tuple[list[int], pa.Table]]:
    """(row numbers, those rows) of each row group that holds some of the wanted."""
    wanted = np.unique(np.asarray(indices, dtype=np.int64))
    begin = 0
    for group in range(file.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        inside = wanted[(wanted >= begin) & (wanted < end)]
        if len(inside):
            yield inside.tolist(), file.read_row_group(group, columns=columns).take(pa.array(inside - begin))
        begin = end


def take(path: Path, indices: Sequence[int]) -> list[Chat]:
    """The rows, in the order asked for; reads only the row groups that hold them."""
    found: dict[int, Chat] = {}
    with _open(path) as file:
        for numbers, table in _tables(file, indices, _CHAT):
            found.update(zip(numbers, _chats(table), strict=True))
    return [found[index] for index in indices]


def _chats(table: pa.Table | pa.RecordBatch) -> list[Chat]:
    return [
        Chat([_message(message) for message in messages], json.loads(tools) if tools else None)
        for messages, tools in zip(table.column("messages").to_pylist(), table.column("tools").to_pylist(), strict=True)
    ]


def _message(stored: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in stored.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = json.loads(message["tool_calls"])
    return message


def read(path: Path, offset: int, limit: int) -> list[schemas.DatasetRow]:
    """Rows `offset` to `offset + limit`, fewer at the end of the data set."""
    indices = range(max(offset, 0), min(max(offset, 0) + limit, count(path)))
    return [
        schemas.DatasetRow(
            index=index, messages=[schemas.DatasetMessage(**message) for message in row.messages], tools=row.tools
        )
        for index, row in zip(indices, take(path, indices), strict=True)
    ]


def chunks(path: Path, size: int = 1024) -> Iterator[list[Chat]]:
    """All rows in order, `size` rows at a time."""
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=size, columns=_CHAT):
            yield _chats(batch)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _is_of(file: pq.ParquetFile, tokenizer: Tokenizer) -> bool:
    found: bytes | None = (file.schema_arrow.metadata or {}).get(FINGERPRINT)
    return found == tokenizer.fingerprint.encode()


def encoded(path: Path, tokenizer: Tokenizer, indices: Sequence[int] | None = None) -> list[Encoded] | None:
    """The rows (None: all) as stored, in the order asked for; None when they were encoded by another tokenizer.

    Costs about a microsecond of Python a row; the rest is done by Arrow, without the interpreter's lock.
    """
    columns = ["input_ids", "trained"]
    with _open(path) as file:
        if not _is_of(file, tokenizer):
            return None
        if indices is not None:
            found: dict[int, Encoded] = {}
            for numbers, table in _tables(file, indices, columns):
                found.update(zip(numbers, _encoded(table), strict=True))
            return [found[index] for index in indices]
        return [row for group in range(file.num_row_groups) for row in _encoded(file.read_row_group(group, columns))]


def _encoded(table: pa.Table) -> list[Encoded]:
    rows: list[Encoded] = []
    for batch in table.to_batches():
        ids, trained = batch.column("input_ids"), batch.column("trained")
        offsets = ids.offsets.to_numpy()
        edges = (offsets - offsets[0]).tolist()
        flat_ids = ids.flatten().to_numpy()
        flat_trained = trained.flatten().to_numpy(zero_copy_only=False)
        rows += [Encoded(flat_ids[begin:end], flat_trained[begin:end]) for begin, end in pairwise(edges)]
    return rows


def lengths(path: Path, tokenizer: Tokenizer) -> list[int] | None:
    """Tokens of each row as stored; None when they were not counted with this tokenizer."""
    with _open(path) as file:
        if not _is_of(file, tokenizer):
            return None
        stored: list[int] = file.read(columns=["tokens"]).column("tokens").to_pylist()
        return stored


def line(path: Path, index: int) -> int:
    """Line (record, in a format without lines) of the uploaded file where the row began."""
    with _open(path) as file:
        return int(file.read(columns=["line"]).column("line")[index].as_py())


def longest(path: Path) -> tuple[int, int, int] | None:
    """(index, line, tokens) of the first of the longest rows; None without rows or token counts."""
    with _open(path) as file:
        table = file.read(columns=["line", "tokens"])
    if table.num_rows == 0 or table.column("tokens").null_count:
        return None
    tokens = table.column("tokens").to_numpy()
    index = int(np.argmax(tokens))
    return index, int(table.column("line")[index].as_py()), int(tokens[index])
