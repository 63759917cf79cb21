"""The normalised data set: a Parquet file that `dataset.ingest` writes and everything else reads.

Columns: messages (list of {role, content}), line (where the row began in the uploaded file, from 1), tokens and
answer_tokens (under the tokenizer whose fingerprint the file's metadata hold; null when it was written without one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.api import schemas
from core.errors import NotFound
from core.intake.tokenizer import Tokenizer

MESSAGE = pa.struct([pa.field("role", pa.string(), False), pa.field("content", pa.string(), False)])
SCHEMA = pa.schema(
    [
        pa.field("messages", pa.list_(MESSAGE), False),
        pa.field("line", pa.int64(), False),
        pa.field("tokens", pa.int32()),
        pa.field("answer_tokens", pa.int32()),
    ]
)
FINGERPRINT = b"harli.tokenizer"


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


def take(path: Path, indices: Sequence[int]) -> list[list[dict[str, str]]]:
    """The messages of the rows, in the order asked for; reads only the row groups that hold them."""
    found: dict[int, list[dict[str, str]]] = {}
    wanted = np.unique(np.asarray(indices, dtype=np.int64))
    with _open(path) as file:
        begin = 0
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            inside = wanted[(wanted >= begin) & (wanted < end)]
            if len(inside):
                table = file.read_row_group(group, columns=["messages"]).take(pa.array(inside - begin))
                found.update(zip(inside.tolist(), table.column("messages").to_pylist(), strict=True))
            begin = end
    return [found[index] for index in indices]


def read(path: Path, offset: int, limit: int) -> list[schemas.DatasetRow]:
    """Rows `offset` to `offset + limit`, fewer at the end of the data set."""
    indices = range(max(offset, 0), min(max(offset, 0) + limit, count(path)))
    return [
        schemas.DatasetRow(index=index, messages=[schemas.Message(**message) for message in messages])
        for index, messages in zip(indices, take(path, indices), strict=True)
    ]


def chunks(path: Path, size: int = 1024) -> Iterator[list[list[dict[str, str]]]]:
    """The messages of all rows in order, `size` rows at a time."""
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=size, columns=["messages"]):
            yield batch.column("messages").to_pylist()


def lengths(path: Path, tokenizer: Tokenizer) -> list[int] | None:
    """Tokens of each row as stored; None when they were not counted with this tokenizer."""
    with _open(path) as file:
        if (file.schema_arrow.metadata or {}).get(FINGERPRINT) != tokenizer.fingerprint.encode():
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
