"""A data set comes in: find out what it is, check every row, write the normalised Parquet and a report.

The file is read once, a block at a time. Every faulty row is counted, but one is enough to refuse the file: what was
uploaded is what is trained on, or nothing is.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from core.api import schemas
from core.errors import Invalid
from core.intake import chat, checks, columnar, columns, languages, readers, rows, shapes, source
from core.intake.chat import Encoded
from core.intake.columns import Columns, ContentHash
from core.intake.duplicates import Duplicates
from core.intake.findings import REASONS, Fault, Findings
from core.intake.readers import Block
from core.intake.rows import Chat
from core.intake.shapes import Chats, Shape
from core.intake.source import Source
from core.intake.tokenizer import Tokenizer

SAMPLE = 200
# The texts are most of the file, and compressing them would take as long as reading and checking them.
_PLAIN = "messages.list.element.content"
PARQUET = {
    "compression": {_PLAIN: "none", "messages.list.element.role": "snappy", "input_ids.list.element": "zstd"},
    "use_dictionary": ["messages.list.element.role"],
    "write_statistics": False,
    # Values that are encoded at a go; of the default, 1,024, there would be hundreds of batches a block.
    "write_batch_size": 1 << 14,
}
# Between two looks at whether to go on: what takes a fraction of a second to tokenise.
TOKENIZE_ROWS = 512
TOKENIZE_BYTES = 256 << 10
# Rows whose language is told: the first ones, and some of every block.
LANGUAGE_FIRST = 256
LANGUAGE_OF_BLOCK = 8


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
    usual_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> schemas.DatasetReport:
    """Check the uploaded file and write it, normalised, to `destination` (see `rows` for its columns).

    The format is told by content (`filename`, the upload's name, only where that leaves it open). `columns` maps roles
    (`shapes.COLUMN_ROLES`) to columns; roles it leaves out are found by the usual names. With a tokenizer every row is
    rendered and encoded, and rows of more than `usual_tokens` (a job's default) are remarked. `progress(bytes read,
    bytes in all)` is called several times a second and may raise to cancel.

    Raises InvalidDataset when the file is empty, of an unknown kind, or has a row that cannot be used; then, and on any
    other error, nothing is left at `destination`. Memory does not grow with the file.
    """
    columns = columns or {}
    try:
        shapes.check_mapping(columns)
        found = source.identify(source_path, filename, known_names=lambda names: shapes.known_names(names, columns))
        size = source_path.stat().st_size

        def look(read: int) -> None:
            if progress:
                progress(read, size)

        with _replacing(destination) as part, closing(Duplicates(destination.parent)) as duplicates:
            intake = _Intake(found, filename, columns, tokenizer, usual_tokens, duplicates, look)
            with pq.ParquetWriter(part, intake.schema, **PARQUET) as writer:
                for block in found.blocks(intake.wanted_columns()):
                    table = intake.take(block)
                    if not intake.findings.errors:
                        writer.write_table(table)
                    look(block.read)
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

    def __init__(
        self,
        found: Source,
        filename: str,
        columns: Mapping[str, str],
        tokenizer: Tokenizer | None,
        usual_tokens: int | None,
        duplicates: Duplicates,
        look: Callable[[int], None],
    ) -> None:
        self.findings = Findings()
        self._source = found
        self._filename = filename
        self._mapping = columns
        self._tokenizer = tokenizer
        self._usual_tokens = usual_tokens
        self._duplicates = duplicates
        self._look = look
        self._shape: Shape | None = None
        if found.columns is not None:
            self._shape = self._detected(found.columns, [])
        self._controls = checks.controls_of(tokenizer) if tokenizer else None
        self._rows_read = self._kept = 0
        self._tokens = self._answer_tokens = self._longest = 0
        self._lengths = np.zeros(64, dtype=np.int64)
        self._languages: Counter[str] = Counter()
        self._content = ContentHash()

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
        batch = self._at_once(block) or self._one_by_one(readers.parsed(block))
        encoded: Sequence[Encoded | None] = []
        if self._tokenizer:
            encoded = self._encoded(batch, self._tokenizer, block.read)
            if None in encoded:
                batch = batch.chosen([row is not None for row in encoded])
        self._remark(batch)
        self._content.add(batch.columns)
        return self._table(batch, [row for row in encoded if row is not None])

    def finish(self) -> schemas.DatasetReport:
        """The report. Raises InvalidDataset, with it, when there is a fault or no row."""
        checks.remark_duplicates(self.findings, self._duplicates, self._source.place)
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
        if not self._kept:
            raise InvalidDataset(
                "empty_file", f"{self._filename} has no rows to train on. Upload a file with rows.", "file", report
            )
        return report

    # ---- the shape ---------------------------------------------------------------------------------------------------

    def _find_shape(self, records: Sequence[Any]) -> None:
        """Settle the shape on the first records; only they tell one kind of chat from the other."""
        samples = [record for record in records[:SAMPLE] if not isinstance(record, Fault)]
        if self._kept or not samples or (self._shape is not None and self._shape.name != "OpenAI chat"):
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
            self.findings.add("unused_columns", shapes.shown(unused), count=len(unused))
        return shape

    def _no_shape(self, names: Sequence[str], samples: Sequence[Any]) -> Invalid:
        lists = [
            name
            for name, value in (samples[0].items() if samples and isinstance(samples[0], dict) else ())
            if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        hint = f" If the rows are the list under {shapes.shown(lists[:1])}, upload that list alone." if lists else ""
        return Invalid(
            "unknown_columns",
            f"{self._filename} has the columns {shapes.shown(names)}. A row needs messages, "
            "or prompt and completion, or instruction and output, or text: rename the columns, or map those roles to "
            f"them.{hint}",
            "columns",
        )

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault, line: int, number: int) -> None:
        self.findings.add(fault.code, self._source.place(line, number), fault.what)

    def _at_once(self, block: Block) -> _Batch | None:
        """The block's rows where all are as they should be and Arrow can read them, else None. The first rows of the
        file settle its shape, one by one."""
        if block.text is None or self._shape is None or not self._kept:
            return None
        columns = columnar.read(block.text, len(block.lines), self._shape)
        if columns is None:
            return None
        numbers = range(self._rows_read + 1, self._rows_read + 1 + len(columns))
        self._rows_read += len(columns)
        return _Batch(block.lines, numbers, columns)

    def _one_by_one(self, block: Block) -> _Batch:
        """The block's rows, without those that are at fault."""
        self._find_shape(block.records)
        lines, numbers, chats = self._converted(block)
        self._rows_read += len(block.records)
        found = columns.of_chats(chats)
        if found is None:
            lines, numbers, chats = self._encodable(lines, numbers, chats)
            found = columns.of_chats(chats)
        assert found is not None, "what is not Unicode has been left out"
        return _Batch(lines, numbers, found)

    def _converted(self, block: Block) -> tuple[Sequence[int], Sequence[int], Chats]:
        """(lines, numbers, chats) of the good rows."""
        numbers = range(self._rows_read + 1, self._rows_read + 1 + len(block.records))
        at_once = self._shape.convert_all(block.records) if self._shape else None
        if at_once is not None:
            return block.lines, numbers, at_once
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
        return lines, kept, shapes.flat(good)

    def _encodable(
        self, lines: Sequence[int], numbers: Sequence[int], chats: Chats
    ) -> tuple[Sequence[int], Sequence[int], Chats]:
        """Without the rows whose text is not Unicode."""
        kept_lines, kept_numbers, good = [], [], []
        for line, number, row in zip(lines, numbers, shapes.rows(chats), strict=True):
            fault = checks.encoding_fault(row)
            if fault is not None:
                self._fault(fault, line, number)
                continue
            kept_lines.append(line)
            kept_numbers.append(number)
            good.append(row)
        return kept_lines, kept_numbers, shapes.flat(good)

    def _encoded(self, batch: _Batch, tokenizer: Tokenizer, read: int) -> list[Encoded | None]:
        """The rows' tokens; None for a row that the chat template refuses."""
        encoded: list[Encoded | None] = []
        chats = batch.columns.chats()
        for part in _parts(batch.columns):
            chosen = chats[part]
            try:
                encoded += chat.encode_many(tokenizer, [row.messages for row in chosen], [row.tools for row in chosen])
            except Invalid as error:
                if error.code in checks.OF_THE_MODEL:
                    raise
                for row, line, number in zip(chosen, batch.lines[part], batch.numbers[part], strict=True):
                    encoded.append(self._encoded_alone(row, line, number, tokenizer))
            self._look(read)
        return encoded

    def _encoded_alone(self, row: Chat, line: int, number: int, tokenizer: Tokenizer) -> Encoded | None:
        found = checks.encoded(row, tokenizer)
        if isinstance(found, Fault):
            self._fault(found, line, number)
            return None
        return found

    def _remark(self, batch: _Batch) -> None:
        """Count what is worth a warning, and keep what tells duplicates."""
        found = batch.columns
        self._duplicates.add(_as_array(batch.lines), *found.hashes())
        for code, at, what in checks.remarks(found, self._controls):
            self._warn(code, batch, at, what)
        told = LANGUAGE_FIRST if not self._kept else LANGUAGE_OF_BLOCK
        for at in range(0, len(found), max(len(found) // told, 1)):
            self._languages[languages.language(" ".join(reversed(found.texts(at))))] += 1
        self._kept += len(found)

    def _warn(self, code: str, batch: _Batch, at: int, what: str = "") -> None:
        self.findings.add(code, self._source.place(batch.lines[at], batch.numbers[at]), what)

    def _table(self, batch: _Batch, encoded: Sequence[Encoded]) -> pa.Table:
        count = len(batch.lines)
        if not self._tokenizer:
            self._count_lengths(batch.columns.bytes())
            arrays = [pa.nulls(count, rows.SCHEMA.field(name).type) for name in rows.SCHEMA.names[3:]]
        else:
            tokens = np.fromiter((len(row.ids) for row in encoded), np.int32, count)
            answers = np.fromiter((np.count_nonzero(row.trained) for row in encoded), np.int32, count)
            self._tokens += int(tokens.sum())
            self._answer_tokens += int(answers.sum())
            self._longest = max(self._longest, int(tokens.max(initial=0)))
            self._count_lengths(tokens)
            for at in np.flatnonzero(tokens > self._usual_tokens).tolist() if self._usual_tokens is not None else ():
                self._warn("long_rows", batch, at, f"{tokens[at]} tokens, {self._usual_tokens} are usual")
            edges = pa.array(np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32))
            ids = np.concatenate([row.ids for row in encoded]) if encoded else np.zeros(0, np.int32)
            trained = np.concatenate([row.trained for row in encoded]) if encoded else np.zeros(0, np.bool_)
            arrays = [
                pa.array(tokens),
                pa.array(answers),
                pa.ListArray.from_arrays(edges, pa.array(ids)),
                pa.ListArray.from_arrays(edges, pa.array(trained)),
            ]
        lines = pa.array(_as_array(batch.lines))
        return pa.Table.from_arrays([*batch.columns.stored(), lines, *arrays], schema=self.schema)

    def _count_lengths(self, lengths: npt.NDArray[Any]) -> None:
        """Rows by the power of two that their length stays within."""
        powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        self._lengths += np.bincount(powers, minlength=len(self._lengths))

    # ---- the whole file ----------------------------------------------------------------------------------------------

    def _report(self) -> schemas.DatasetReport:
        counted = self._tokenizer is not None and self._kept > 0
        name = self._shape.name if self._shape else "unknown"
        return schemas.DatasetReport(
            format=f"{name} ({self._source.name})",
            columns=self._shape.columns if self._shape else {},
            rows=self._kept,
            rows_read=self._rows_read,
            findings=self.findings.listed(),
            tokens=self._tokens if counted else None,
            answer_tokens=self._answer_tokens if counted else None,
            longest_row_tokens=self._longest if counted else None,
            mean_row_tokens=round(self._tokens / self._kept, 2) if counted else None,
            lengths=[
                schemas.LengthBucket(up_to=1 << power, rows=int(count))
                for power, count in enumerate(self._lengths)
                if count
            ],
            length_unit="tokens" if counted else "bytes",
            languages=dict(self._languages.most_common()),
            content_sha256=self._content.digest(),
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Good rows: where each began in the file, its number among the rows read, and the chats."""

    lines: Sequence[int]
    numbers: Sequence[int]
    columns: Columns

    def chosen(self, keep: Sequence[bool]) -> _Batch:
        """The rows for which `keep` holds."""
        return _Batch(
            list(compress(self.lines, keep)), list(compress(self.numbers, keep)), self.columns.chosen(np.array(keep))
        )


def _as_array(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """Those of a range are made by numpy, not one by one."""
    if isinstance(numbers, range):
        return np.arange(numbers.start, numbers.stop, dtype=np.int64)
    return np.array(numbers, dtype=np.int64)


def _parts(columns: Columns) -> Iterator[slice]:
    """The rows cut where tokenising is due a look at whether to go on."""
    begin = size = 0
    for at, length in enumerate(columns.bytes().tolist()):
        size += length
        if at + 1 - begin >= TOKENIZE_ROWS or size >= TOKENIZE_BYTES:
            yield slice(begin, at + 1)
            begin, size = at + 1, 0
    if begin < len(columns):
        yield slice(begin, len(columns))
