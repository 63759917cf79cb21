"""Readers of the containers that rows come in. Each yields `Block`s and holds no more of the file than one.

What cannot be read as a record stands in its place as a `Fault`, so that one bad row does not hide the next. Where
nothing tells how to go on behind a fault (JSON, CSV) reading ends there, and the fault says so.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import Invalid
from core.intake.findings import Fault
from core.intake.stream import MAX_EXPANDED_BYTES, Stream, too_expanded

BLOCK_BYTES = 2 << 20
BLOCK_ROWS = 4096
# Several million tokens, far beyond the largest micro-batch; what a record becomes in memory is many times its text.
MAX_RECORD_BYTES = 16 << 20
BOM = b"\xef\xbb\xbf"
_LINE_BREAK = 10
# In Western languages letters beyond ASCII stand alone or in twos.
_FOREIGN = re.compile(rb"[\x80-\xff]{4}")
_BATCH_BYTES = 64 << 20
_STOPPED = "; the rest of the file was not read"


@dataclass(frozen=True, slots=True)
class Block:
    """Records that follow each other. `lines[i]` is where record i begins in the file, from 1 (in a format without
    lines: its number); `read` the bytes of the upload read so far. Of JSON lines there is the `text` instead, which
    `parsed` makes records of."""

    lines: Sequence[int]
    records: Sequence[Any]
    read: int = 0
    text: bytes | None = None


def _gathered(found: Iterator[tuple[int, Any]], stream: Stream) -> Iterator[Block]:
    """Blocks of records that come one by one."""
    lines: list[int] = []
    records: list[Any] = []
    begun = stream.expanded
    for line, record in found:
        lines.append(line)
        records.append(record)
        if len(records) >= BLOCK_ROWS or stream.expanded - begun >= BLOCK_BYTES:
            yield Block(lines, records, stream.position)
            lines, records, begun = [], [], stream.expanded
    if records:
        yield Block(lines, records, stream.position)


def _too_large_record() -> Invalid:
    return Invalid(
        "record_too_large",
        f"A single row is larger than {MAX_RECORD_BYTES >> 20} MiB. If the file is one object around the rows, upload "
        "the list of rows alone; if a quote is not closed, close it.",
        "file",
    )


# ---- lines -----------------------------------------------------------------------------------------------------------


def jsonl(path: Path, filename: str) -> Iterator[Block]:
    """One JSON value a line; blank lines are skipped."""
    with Stream(path, filename) as stream:
        first = 1
        for text in _whole_lines(stream):
            # numpy counts bytes several times as fast as bytes.count does.
            breaks = int(np.count_nonzero(np.frombuffer(text, np.uint8) == _LINE_BREAK))
            count = breaks + (not text.endswith(b"\n"))
            yield Block(range(first, first + count), (), stream.position, text)
            first += count


def parsed(block: Block) -> Block:
    """The block with the records of its text, without blank lines."""
    if block.text is None:
        return block
    texts = block.text.removesuffix(b"\n").split(b"\n")
    lines = block.lines
    try:
        records = [msgspec.json.decode(text) for text in texts]
    except (msgspec.DecodeError, RecursionError):
        lines = [line for line, text in zip(lines, texts, strict=True) if text.strip()]
        records = [_json_or_fault(text) for text in texts if text.strip()]
    return Block(lines, records, block.read)


def text(path: Path, filename: str) -> Iterator[Block]:
    """Plain text, one row a line; blank lines are skipped."""
    with Stream(path, filename) as stream:
        for first, texts in _lines(stream):
            kept = [(first + at, line.removesuffix(b"\r")) for at, line in enumerate(texts) if line.strip()]
            yield Block(
                [at for at, _ in kept],
                [{"text": line.decode("utf-8", "surrogateescape")} for _, line in kept],
                stream.position,
            )


def _lines(stream: Stream) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first, lines) in blocks of whole lines, without the file's byte-order mark."""
    number = 1
    for block in _whole_lines(stream):
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield number, lines
        number += len(lines)


def _whole_lines(stream: Stream) -> Iterator[bytes]:
    parts: list[bytes] = []
    data = stream.read(BLOCK_BYTES).removeprefix(BOM)
    while data:
        cut = data.rfind(b"\n") + 1
        if cut:
            yield b"".join([*parts, memoryview(data)[:cut]])
            parts = []
        parts.append(data[cut:])
        if sum(map(len, parts)) > MAX_RECORD_BYTES:
            raise _too_large_record()
        data = stream.read(BLOCK_BYTES)
    if any(parts):
        yield b"".join(parts)


def _json_or_fault(line: bytes) -> Any:
    """The value of one line. Python's own parser says best where a line is broken (and takes NaN)."""
    try:
        # Files that were joined have a mark before each.
        return json.loads(line.removeprefix(BOM).decode("utf-8"))
    except UnicodeDecodeError:
        return not_utf8(line)
    except RecursionError:
        return Fault("broken_json", "objects nested too deeply")
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as in "Unterminated string starting at"
        return Fault("broken_json", f"{what} at column {error.colno}, near {_near(error.doc, error.pos)}")
    except ValueError as error:  # an integer of thousands of digits
        return Fault("broken_json", str(error))


def _near(document: str, position: int) -> str:
    return repr(document[max(position - 20, 0) : position + 20].strip())


def not_utf8(data: bytes) -> Fault:
    """What bytes that are not UTF-8 look like, and how to convert them."""
    try:
        data.decode("utf-8")
        byte = "a byte"
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x}"
    if _FOREIGN.search(data):
        return Fault(
            "not_utf8",
            f"{byte} is not UTF-8; iconv -f ENCODING -t UTF-8 converts it, where ENCODING is what the file was written "
            "in (WINDOWS-1251, SHIFT_JIS, GB18030 …), which the bytes do not tell",
        )
    try:
        data.decode("cp1252")
        likely = "WINDOWS-1252"
    except UnicodeDecodeError:
        likely = "ISO-8859-1"
    return Fault("not_utf8", f"{byte} is not UTF-8; it looks like {likely}, which iconv -f {likely} -t UTF-8 converts")


def encoding_fault(text: str) -> Fault | None:
    """What is wrong with a text that is not Unicode: bytes that were let through, half characters; else None."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return not_utf8(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            return Fault("not_utf8", "half of a surrogate pair (\\ud800 to \\udfff) stands alone in the text")
    return None


# ---- JSON over many lines --------------------------------------------------------------------------------------------


def json_list(path: Path, filename: str) -> Iterator[Block]:
    """The elements of one JSON list."""
    with Stream(path, filename) as stream:
        yield from _gathered(_elements(_JsonText(stream)), stream)


def json_objects(path: Path, filename: str) -> Iterator[Block]:
    """JSON objects one behind the other, each over as many lines as it likes."""
    with Stream(path, filename) as stream:
        yield from _gathered(_values(_JsonText(stream)), stream)


class _JsonText:
    """A text that is parsed value by value while it is read."""

    def __init__(self, stream: Stream) -> None:
        self._reader = io.TextIOWrapper(
            io.BufferedReader(stream, BLOCK_BYTES), encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        self._decoder = json.JSONDecoder()
        self._buffer = ""
        self._position = 0
        self._ended = False
        self.line = 1

    def _read_more(self) -> None:
        kept = self._buffer[self._position :]
        if len(kept) > MAX_RECORD_BYTES:
            raise _too_large_record()
        # Reading at least as much again keeps parsing a large value from its start again affordable.
        more = self._reader.read(max(BLOCK_BYTES, len(kept)))
        self._ended = not more
        self._buffer, self._position = kept + more, 0

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            begin, buffer = self._position, self._buffer
            while self._position < len(buffer) and buffer[self._position] in " \t\r\n":
                self._position += 1
            self.line += buffer.count("\n", begin, self._position)
            if self._position < len(buffer):
                return buffer[self._position]
            if self._ended:
                return ""
            self._read_more()

    def skip(self) -> None:
        """Step over the character that `peek` gave."""
        self._position += 1

    def near(self) -> str:
        return _near(self._buffer, self._position)

    def value(self) -> Any:
        """The value that begins here, or a Fault."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._position)
            except RecursionError:
                return Fault("broken_json", "objects nested too deeply" + _STOPPED)
            except json.JSONDecodeError as error:
                if not self._ended and _cut_short(error):
                    self._read_more()
                    continue
                line = self.line + self._buffer.count("\n", self._position, error.pos)
                near = _near(self._buffer, error.pos)
                return Fault("broken_json", f"{error.msg.removesuffix(' at')} at line {line}, near {near}{_STOPPED}")
            except ValueError as error:
                return Fault("broken_json", str(error) + _STOPPED)
            self.line += self._buffer.count("\n", self._position, end)
            self._position = end
            return value


def _cut_short(error: json.JSONDecodeError) -> bool:
    """Whether the error may come from the buffer's end alone. A string cut short is reported where it begins."""
    return error.msg.startswith(("Unterminated", "Invalid \\")) or error.pos > len(error.doc) - 16


def _elements(source: _JsonText) -> Iterator[tuple[int, Any]]:
    source.peek()
    source.skip()
    separator = ""
    while (character := source.peek()) != "]":
        if not character:
            yield source.line, Fault("broken_json", "the list is not closed: the file ends too early")
            return
        if character != separator and separator:
            yield source.line, Fault("broken_json", f"a comma is missing between rows, near {source.near()}{_STOPPED}")
            return
        if separator:
            source.skip()
            source.peek()
        separator = ","
        line, value = source.line, source.value()
        yield line, value
        if isinstance(value, Fault):
            return
    source.skip()
    if source.peek():
        yield source.line, Fault("broken_json", f"text follows the list, near {source.near()}{_STOPPED}")


def _values(source: _JsonText) -> Iterator[tuple[int, Any]]:
    while source.peek():
        line, value = source.line, source.value()
        yield line, value
        if isinstance(value, Fault):
            return


# ---- tables ----------------------------------------------------------------------------------------------------------


def separated(path: Path, filename: str, *, delimiter: str, names: Sequence[str]) -> Iterator[Block]:
    """Records of a CSV whose first record is the header; a field may go over several lines."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))
    with Stream(path, filename) as stream:
        yield from _gathered(_records(stream, delimiter, names), stream)


def _records(stream: Stream, delimiter: str, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
    lines = io.TextIOWrapper(
        io.BufferedReader(stream, BLOCK_BYTES), encoding="utf-8-sig", errors="surrogateescape", newline=""
    )
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header = True
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, Fault("broken_csv", f"{error} (read from line {line} to line {reader.line_num}){_STOPPED}")
            return
        if header and fields:
            header = names_delimiter(fields)
        elif fields and len(fields) == len(names):
            yield line, dict(zip(names, fields, strict=True))
        elif fields:
            count = f"{len(fields)} field{'' if len(fields) == 1 else 's'}"
            yield line, Fault("csv_fields", f"{count} where the header has {len(names)}")


def names_delimiter(fields: Sequence[str]) -> bool:
    """Whether these are of the line ``sep=;`` that Excel wants before the header, read with the delimiter it names."""
    return len(fields) == 2 and fields[0].lower() == "sep=" and not fields[1]


def table_columns(path: Path, filename: str) -> tuple[str, ...]:
    """Column names of a Parquet or Arrow file. Raises Invalid when it cannot be read."""
    try:
        if _is_parquet(path):
            return tuple(pq.read_schema(path).names)
        with pa.memory_map(str(path)) as memory:
            return tuple(_arrow(memory).schema.names)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(filename, error) from error


def table(path: Path, filename: str, *, columns: Sequence[str]) -> Iterator[Block]:
    """Rows of a Parquet or Arrow file, the named columns only."""
    number = 1
    records: list[Any] = []
    size = whole = 0
    try:
        for batch in _batches(path, columns):
            for part, part_size in _cut(batch):
                records += _rows(part)
                size += part_size
                whole += part_size
                if whole > MAX_EXPANDED_BYTES:
                    raise too_expanded(filename)
                if len(records) >= BLOCK_ROWS or size >= BLOCK_BYTES:
                    yield Block(range(number, number + len(records)), records)
                    number += len(records)
                    records, size = [], 0
    except (pa.ArrowException, OSError) as error:
        raise _damaged(filename, error) from error
    if records:
        yield Block(range(number, number + len(records)), records)


def _cut(batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
    """(rows, about how many bytes they become) in parts of about a block at most."""
    if not batch.num_rows:
        return
    size = batch.nbytes
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            size += len(column) * (column.dictionary.nbytes // max(len(column.dictionary), 1))
    of_row = -(-size // batch.num_rows)
    if of_row > MAX_RECORD_BYTES:
        raise _too_large_record()
    step = min(max(BLOCK_BYTES // max(of_row, 1), 1), BLOCK_ROWS)
    for begin in range(0, batch.num_rows, step):
        part = batch.slice(begin, step)
        yield part, of_row * part.num_rows


def _rows(part: pa.RecordBatch) -> list[Any]:
    """As Python has them; a row with a value that Python has no room for is a Fault."""
    try:
        return list(part.to_pylist())
    except (ValueError, OverflowError):
        return [_row_or_fault(part.slice(at, 1)) for at in range(part.num_rows)]


def _row_or_fault(row: pa.RecordBatch) -> Any:
    found = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            found[name] = column[0].as_py()
        except UnicodeDecodeError as error:
            return not_utf8(error.object)
        except (ValueError, OverflowError) as error:
            return Fault("wrong_type", f"field {name!r} is a {column.type} that cannot be read ({error})")
    return found


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _arrow(memory: Any) -> Any:
    """Feather, i.e. an Arrow file, or an Arrow stream."""
    magic = memory.read(6)
    memory.seek(0)
    return pa.ipc.open_file(memory) if magic == b"ARROW1" else pa.ipc.open_stream(memory)


def _batches(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    if _is_parquet(path):
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_batch_rows(file.metadata), columns=list(columns))
        return
    with pa.memory_map(str(path)) as memory:
        opened = _arrow(memory)
        batches = (
            (opened.get_batch(at) for at in range(opened.num_record_batches))
            if hasattr(opened, "num_record_batches")
            else iter(opened)
        )
        for batch in batches:
            yield batch.select([at for at, name in enumerate(batch.schema.names) if name in columns])


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """How many rows of a Parquet file to read at a time: many that are equal take next to no room in it, but a place
    each in memory, where none is larger than a column of a row group."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    largest = max(
        (group.column(at).total_uncompressed_size for group in groups for at in range(group.num_columns)), default=0
    )
    return min(max(_BATCH_BYTES // max(largest, 1), 16), 64)


def _damaged(filename: str, error: Exception) -> Invalid:
    return Invalid(
        "damaged_table",
        f"{filename} begins as a Parquet or Arrow file and cannot be read ({error}). Write or upload it again.",
        "file",
    )
