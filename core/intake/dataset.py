"""A data set comes in: find out what it is, check every row, write the normalised Parquet and a report.

The file is read once, a block at a time. Every faulty row is counted, but one is enough to refuse the file: what was
uploaded is what is trained on, or nothing is.
"""

from __future__ import annotations

import os
import re
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from core.api import schemas
from core.errors import Invalid
from core.intake import chat, readers, rows, shapes, source
from core.intake.chat import Encoded
from core.intake.findings import EXAMPLES, REASONS, Fault, Findings
from core.intake.readers import Block
from core.intake.shapes import Chats, Shape
from core.intake.source import Source
from core.intake.tokenizer import Messages, Tokenizer

SAMPLE = 200
PARQUET = {"compression": "zstd", "use_dictionary": ["messages.list.element.role"], "write_statistics": False}
TOKENIZE_ROWS = 512
_OF_THE_MODEL = {"no_chat_template", "no_end_of_turn"}


class InvalidDataset(Invalid):
    """A file that is not taken; `report` says what was found, None when it could not be read as rows at all."""

    def __init__(self, code: str, message: str, param: str | None, report: schemas.DatasetReport | None) -> None:
        super().__init__(code, message, param)
        self.report = report


def ingest(
    source_path: Path,
    destination: Path,
    *,
    filename: str,
    tokenizer: Tokenizer | None,
    columns: dict[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> schemas.DatasetReport:
    """Check the uploaded file and write it, normalised, to `destination` (see `rows` for its columns).

    The format is told by content (`filename`, the upload's name, only where that leaves it open). `columns` maps roles
    (`shapes.COLUMN_ROLES`) to columns; roles it leaves out are found by the usual names. With a tokenizer every row is
    rendered and counted. `progress(bytes read, bytes in all)` is called for every block and may raise to cancel.

    Raises InvalidDataset when the file is empty, of an unknown kind, or has a row that cannot be used; then, and on any
    other error, nothing is left at `destination`. Memory does not grow with the file, but for 25 bytes a row.
    """
    columns = columns or {}
    try:
        shapes.check_mapping(columns)
        found = source.identify(source_path, filename, known_names=lambda names: shapes.known_names(names, columns))
        intake = _Intake(found, filename, columns, tokenizer)
        size = source_path.stat().st_size
        with _replacing(destination) as part:
            with pq.ParquetWriter(part, intake.schema, **PARQUET) as writer:
                for block in found.blocks(intake.wanted_columns()):
                    table = intake.take(block)
                    if not intake.findings.errors:
                        writer.write_table(table)
                    if progress:
                        progress(block.read, size)
            return intake.finish()
    except InvalidDataset:
        raise
    except Invalid as error:
        raise InvalidDataset(error.code, error.message, error.param, None) from error


@contextmanager
def _replacing(destination: Path) -> Iterator[Path]:
    """A file beside `destination` that takes its place at the end, and goes away when the body fails."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        os.replace(part, destination)
    finally:
        part.unlink(missing_ok=True)


class _Intake:
    """What is known of the file so far."""

    def __init__(self, found: Source, filename: str, columns: Mapping[str, str], tokenizer: Tokenizer | None) -> None:
        self.findings = Findings()
        self._source = found
        self._filename = filename
        self._mapping = columns
        self._tokenizer = tokenizer
        self._shape: Shape | None = None
        if found.columns is not None:
            self._shape = self._detected(found.columns, [])
        self._controls = re.compile("|".join(map(re.escape, tokenizer.special_texts))) if tokenizer else None
        self._rows_read = 0
        self._lines, self._row_hashes, self._prompt_hashes = array("q"), array("q"), array("q")
        self._tokens = self._answer_tokens = self._longest = 0

    @property
    def schema(self) -> pa.Schema:
        """The columns; the metadata hold whose tokens were counted."""
        metadata = {rows.FINGERPRINT: self._tokenizer.fingerprint} if self._tokenizer else {}
        return rows.SCHEMA.with_metadata(metadata)

    def wanted_columns(self) -> list[str]:
        """Columns to read, where the format lets them be chosen."""
        return list(self._shape.columns.values()) if self._shape else []

    def take(self, block: Block) -> pa.Table:
        """Check the block's rows; the good ones come back as a table of `schema`."""
        self._find_shape(block.records)
        batch = self._converted(block)
        self._rows_read += len(block.records)
        messages = _message_array(batch.chats)
        if messages is None:
            batch = self._encodable(batch)
            messages = _message_array(batch.chats)
        encoded: Sequence[Encoded | None] = []
        if self._tokenizer:
            encoded = self._encoded(batch, self._tokenizer)
            if None in encoded:
                batch = batch.chosen([row is not None for row in encoded])
                messages = _message_array(batch.chats)
        self._remark(batch)
        return self._table(batch, messages, [row for row in encoded if row is not None])

    def finish(self) -> schemas.DatasetReport:
        """The report. Raises InvalidDataset, with it, when there is a fault or no row."""
        self._remark_duplicates()
        report = self._report()
        first = self.findings.first_error
        if first is not None:
            code, example = first
            counts = ", ".join(f"{count:,} {name}" for name, count in self.findings.counts().items())
            raise InvalidDataset(
                code,
                f"{self._filename}, {example}. {REASONS[code].remedy} Faulty rows: {self.findings.errors:,} of "
                f"{self._rows_read:,} ({counts}). Nothing was stored.",
                "file",
                report,
            )
        if not self._lines:
            raise InvalidDataset(
                "empty_file", f"{self._filename} has no rows to train on. Upload a file with rows.", "file", report
            )
        return report

    # ---- the shape ---------------------------------------------------------------------------------------------------

    def _find_shape(self, records: Sequence[Any]) -> None:
        """Settle the shape on the first records; only they tell one kind of chat from the other."""
        samples = [record for record in records[:SAMPLE] if not isinstance(record, Fault)]
        if self._lines or not samples or (self._shape is not None and self._shape.name != "OpenAI chat"):
            return
        names = self._source.columns
        if names is None:
            names = tuple(dict.fromkeys(name for record in samples if isinstance(record, dict) for name in record))
        self._shape = self._detected(names, samples)

    def _detected(self, names: Sequence[str], samples: Sequence[Any]) -> Shape:
        shape = shapes.detect(names, samples, self._mapping)
        if shape is None:
            raise self._no_shape(names, samples)
        unused = [name for name in names if name not in shape.columns.values()]
        if unused and not self.findings.has("unused_columns"):
            self.findings.add("unused_columns", ", ".join(map(repr, unused[:12])), count=len(unused))
        return shape

    def _no_shape(self, names: Sequence[str], samples: Sequence[Any]) -> Invalid:
        lists = [
            name
            for name, value in (samples[0].items() if samples and isinstance(samples[0], dict) else ())
            if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        hint = f" If the rows are the list under {lists[0]!r}, upload that list alone." if lists else ""
        return Invalid(
            "unknown_columns",
            f"{self._filename} has the columns {', '.join(map(repr, names[:12])) or '(none)'}. A row needs messages, "
            "or prompt and completion, or instruction and output, or text: rename the columns, or map those roles to "
            f"them.{hint}",
            "columns",
        )

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault, line: int, number: int) -> None:
        self.findings.add(fault.code, self._source.place(line, number), fault.what)

    def _converted(self, block: Block) -> _Batch:
        """The block's rows, without those that are at fault."""
        numbers = range(self._rows_read + 1, self._rows_read + 1 + len(block.records))
        at_once = self._shape.convert_all(block.records) if self._shape else None
        if at_once is not None:
            return _Batch(block.lines, numbers, at_once)
        lines, kept, good = [], [], []
        for line, number, record in zip(block.lines, numbers, block.records, strict=True):
            row = record if isinstance(record, Fault) or self._shape is None else self._shape.convert(record)
            if isinstance(row, Fault):
                self._fault(row, line, number)
                continue
            if row.numbers:
                self.findings.add("number_as_text", self._source.place(line, number))
            lines.append(line)
            kept.append(number)
            good.append(row)
        return _Batch(lines, kept, shapes.flat(good))

    def _encodable(self, batch: _Batch) -> _Batch:
        """Without the rows whose text is not Unicode; readers let such bytes through as lone surrogates."""
        faults = [_encoding_fault("".join(contents)) for contents in batch.contents()]
        for line, number, fault in zip(batch.lines, batch.numbers, faults, strict=True):
            if fault is not None:
                self._fault(fault, line, number)
        return batch.chosen([fault is None for fault in faults])

    def _encoded(self, batch: _Batch, tokenizer: Tokenizer) -> list[Encoded | None]:
        """The rows' tokens; None for a row that the chat template refuses."""
        encoded: list[Encoded | None] = []
        places = list(zip(batch.lines, batch.numbers, strict=True))
        messages = batch.messages()
        for begin in range(0, len(messages), TOKENIZE_ROWS):
            part = messages[begin : begin + TOKENIZE_ROWS]
            try:
                encoded += chat.encode_many(tokenizer, part)
            except Invalid as error:
                if error.code in _OF_THE_MODEL:
                    raise
                for row, (line, number) in zip(part, places[begin : begin + TOKENIZE_ROWS], strict=True):
                    encoded.append(self._encoded_alone(row, line, number, tokenizer))
        return encoded

    def _encoded_alone(self, row: Messages, line: int, number: int, tokenizer: Tokenizer) -> Encoded | None:
        try:
            return chat.encode(tokenizer, row)
        except Invalid as error:
            self._fault(Fault(error.code, error.message), line, number)
            return None

    def _remark(self, batch: _Batch) -> None:
        """Count what is worth a warning, and keep what tells duplicates."""
        rows_of = batch.contents()
        self._lines.extend(batch.lines)
        self._row_hashes.extend(map(hash, rows_of))
        self._prompt_hashes.extend([hash(row[:-1] or row) for row in rows_of])
        contents = batch.chats.contents
        if "" in contents or any(map(str.isspace, contents)):
            for at, row in enumerate(rows_of):
                if not row[-1].strip():
                    self._warn("empty_answer", batch, at)
                if len(row) > 1 and not row[-2].strip():
                    self._warn("empty_prompt", batch, at)
        if self._controls is not None:
            for at, row in enumerate(rows_of):
                if control := next((match for text in row if (match := self._controls.search(text))), None):
                    self._warn("control_token", batch, at, repr(control.group()))

    def _warn(self, code: str, batch: _Batch, at: int, what: str = "") -> None:
        self.findings.add(code, self._source.place(batch.lines[at], batch.numbers[at]), what)

    def _table(self, batch: _Batch, messages: pa.Array, encoded: Sequence[Encoded]) -> pa.Table:
        tokens = [len(row.ids) for row in encoded]
        answer_tokens = [int(np.count_nonzero(row.trained)) for row in encoded]
        self._tokens += sum(tokens)
        self._answer_tokens += sum(answer_tokens)
        self._longest = max([self._longest, *tokens])
        uncounted = pa.nulls(len(batch.lines), pa.int32())
        return pa.Table.from_arrays(
            [
                messages,
                pa.array(batch.lines, pa.int64()),
                pa.array(tokens, pa.int32()) if self._tokenizer else uncounted,
                pa.array(answer_tokens, pa.int32()) if self._tokenizer else uncounted,
            ],
            schema=self.schema,
        )

    # ---- the whole file ----------------------------------------------------------------------------------------------

    def _remark_duplicates(self) -> None:
        row_hashes, prompt_hashes = np.asarray(self._row_hashes), np.asarray(self._prompt_hashes)
        same_row = _repeats(row_hashes)
        for code, hashes, repeats in (
            ("duplicate_rows", row_hashes, same_row),
            ("duplicate_prompts", prompt_hashes, _repeats(prompt_hashes) & ~same_row),
        ):
            where = np.flatnonzero(repeats)
            for at in where[:EXAMPLES]:
                earlier = self._source.place(self._lines[int(np.argmax(hashes == hashes[at]))], None)
                self.findings.add(code, self._source.place(self._lines[at], None), f"as {earlier}")
            if len(where) > EXAMPLES:
                self.findings.add(code, "", count=len(where) - EXAMPLES)

    def _report(self) -> schemas.DatasetReport:
        kept = len(self._lines)
        counted = self._tokenizer is not None and kept > 0
        name = self._shape.name if self._shape else "unknown"
        return schemas.DatasetReport(
            format=f"{name} ({self._source.name})",
            columns=self._shape.columns if self._shape else {},
            rows=kept,
            rows_read=self._rows_read,
            findings=self.findings.listed(),
            tokens=self._tokens if counted else None,
            answer_tokens=self._answer_tokens if counted else None,
            longest_row_tokens=self._longest if counted else None,
            mean_row_tokens=round(self._tokens / kept, 2) if counted else None,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Good rows: where each began in the file, its number among the rows read, and the chats."""

    lines: Sequence[int]
    numbers: Sequence[int]
    chats: Chats

    def contents(self) -> list[tuple[str, ...]]:
        """The contents of each row's messages."""
        remaining = iter(self.chats.contents)
        return [tuple(islice(remaining, size)) for size in self.chats.sizes]

    def messages(self) -> list[list[dict[str, str]]]:
        """The rows as the chat template takes them."""
        remaining = iter(
            [{"role": role, "content": text} for role, text in zip(self.chats.roles, self.chats.contents, strict=True)]
        )
        return [list(islice(remaining, size)) for size in self.chats.sizes]

    def chosen(self, keep: Sequence[bool]) -> _Batch:
        """The rows for which `keep` holds."""
        of_message = [kept for kept, size in zip(keep, self.chats.sizes, strict=True) for _ in range(size)]
        return _Batch(
            list(compress(self.lines, keep)),
            list(compress(self.numbers, keep)),
            Chats(
                list(compress(self.chats.roles, of_message)),
                list(compress(self.chats.contents, of_message)),
                list(compress(self.chats.sizes, keep)),
            ),
        )


def _message_array(chats: Chats) -> pa.Array | None:
    """The chats as a column; None when one holds text that is not Unicode."""
    offsets = np.zeros(len(chats.sizes) + 1, dtype=np.int32)
    np.cumsum(chats.sizes, out=offsets[1:])
    try:
        values = [pa.array(texts, pa.string()) for texts in (chats.roles, chats.contents)]
    except UnicodeEncodeError:
        return None
    messages = pa.StructArray.from_arrays(values, fields=list(rows.MESSAGE))
    return pa.ListArray.from_arrays(pa.array(offsets), messages, type=rows.SCHEMA.field("messages").type)


def _encoding_fault(text: str) -> Fault | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return readers.not_utf8(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            return Fault("not_utf8", "half of a surrogate pair (\\ud800 to \\udfff) stands alone in the text")
    return None


def _repeats(hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Where a value equals an earlier one."""
    # Most values are unique, so only those that are not get as far as an index of their places.
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    repeats = np.isin(hashes, repeated)
    places = np.flatnonzero(repeats)
    _, first = np.unique(hashes[places], return_index=True)
    repeats[places[first]] = False
    return repeats
