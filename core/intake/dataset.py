"""A data set comes in: find out what it is, check every row, write the normalised Parquet and a report.

The file is read once, a block at a time. Every faulty row is counted, but one is enough to refuse the file: what was
uploaded is what is trained on, or nothing is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
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
from core.intake import chat, languages, readers, rows, shapes, source
from core.intake.chat import Encoded
from core.intake.duplicates import Duplicates
from core.intake.findings import REASONS, Fault, Findings
from core.intake.readers import Block
from core.intake.rows import Chat
from core.intake.shapes import Chats, Extra, Row, Shape
from core.intake.source import Source
from core.intake.tokenizer import Tokenizer

SAMPLE = 200
PARQUET = {"compression": "zstd", "use_dictionary": ["messages.list.element.role"], "write_statistics": False}
# Between two looks at whether to go on: what takes a fraction of a second to tokenise.
TOKENIZE_ROWS = 512
TOKENIZE_CHARACTERS = 256 << 10
# Rows whose language is told: the first ones, and some of every block.
LANGUAGE_FIRST = 256
LANGUAGE_OF_BLOCK = 8
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
        self._controls = re.compile("|".join(map(re.escape, tokenizer.special_texts))) if tokenizer else None
        self._rows_read = self._kept = 0
        self._tokens = self._answer_tokens = self._longest = 0
        self._lengths = np.zeros(64, dtype=np.int64)
        self._languages: Counter[str] = Counter()
        self._content = _ContentHash()

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
        columns = _columns(batch.chats)
        if columns is None:
            batch = self._encodable(batch)
            columns = _columns(batch.chats)
        encoded: Sequence[Encoded | None] = []
        if self._tokenizer:
            encoded = self._encoded(batch, self._tokenizer, block.read)
            if None in encoded:
                batch = batch.chosen([row is not None for row in encoded])
                columns = _columns(batch.chats)
        assert columns is not None, "what is not Unicode has been left out"
        self._remark(batch)
        self._content.add(batch.chats, columns)
        return self._table(batch, columns, [row for row in encoded if row is not None])

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
        faults = [_encoding_fault("".join(texts)) for texts in batch.texts()]
        for line, number, fault in zip(batch.lines, batch.numbers, faults, strict=True):
            if fault is not None:
                self._fault(fault, line, number)
        return batch.chosen([fault is None for fault in faults])

    def _encoded(self, batch: _Batch, tokenizer: Tokenizer, read: int) -> list[Encoded | None]:
        """The rows' tokens; None for a row that the chat template refuses."""
        encoded: list[Encoded | None] = []
        rows_ = batch.rows()
        for part in _parts(batch):
            chosen = rows_[part]
            try:
                encoded += chat.encode_many(tokenizer, [row.messages for row in chosen], [row.tools for row in chosen])
            except Invalid as error:
                if error.code in _OF_THE_MODEL:
                    raise
                for row, line, number in zip(chosen, batch.lines[part], batch.numbers[part], strict=True):
                    encoded.append(self._encoded_alone(row, line, number, tokenizer))
            self._look(read)
        return encoded

    def _encoded_alone(self, row: Chat, line: int, number: int, tokenizer: Tokenizer) -> Encoded | None:
        try:
            return chat.encode(tokenizer, row.messages, row.tools)
        except Invalid as error:
            self._fault(Fault(error.code, error.message), line, number)
            return None

    def _remark(self, batch: _Batch) -> None:
        """Count what is worth a warning, and keep what tells duplicates."""
        texts = batch.texts()
        self._duplicates.add(batch.lines, texts)
        contents = batch.chats.contents
        if "" in contents or any(map(str.isspace, contents)):
            for at, row in enumerate(batch.contents()):
                if not row[-1].strip() and not batch.calls_last(at):
                    self._warn("empty_answer", batch, at)
                if len(row) > 1 and not row[-2].strip():
                    self._warn("empty_prompt", batch, at)
        if self._controls is not None:
            for at, row in enumerate(texts):
                if control := next((match for text in row if (match := self._controls.search(text))), None):
                    self._warn("control_token", batch, at, repr(control.group()))
        told = LANGUAGE_FIRST if not self._kept else LANGUAGE_OF_BLOCK
        for row in texts[:: max(len(texts) // told, 1)][:told]:
            self._languages[languages.language(" ".join(reversed(row)))] += 1
        self._kept += len(texts)

    def _warn(self, code: str, batch: _Batch, at: int, what: str = "") -> None:
        self.findings.add(code, self._source.place(batch.lines[at], batch.numbers[at]), what)

    def _table(self, batch: _Batch, columns: _Columns, encoded: Sequence[Encoded]) -> pa.Table:
        count = len(batch.lines)
        if not self._tokenizer:
            self._count_lengths(columns.bytes())
            arrays = [pa.nulls(count, rows.SCHEMA.field(name).type) for name in rows.SCHEMA.names[3:]]
        else:
            tokens = np.fromiter((len(row.ids) for row in encoded), np.int32, count)
            answers = np.fromiter((np.count_nonzero(row.trained) for row in encoded), np.int32, count)
            self._tokens += int(tokens.sum())
            self._answer_tokens += int(answers.sum())
            self._longest = max(self._longest, int(tokens.max(initial=0)))
            self._count_lengths(tokens)
            for at in np.flatnonzero(tokens > self._usual_tokens) if self._usual_tokens is not None else ():
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
        lines = pa.array(batch.lines, pa.int64())
        return pa.Table.from_arrays([columns.messages, columns.tools, lines, *arrays], schema=self.schema)

    def _count_lengths(self, lengths: npt.NDArray[Any]) -> None:
        """Rows by the power of two that their length stays within."""
        powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        self._lengths += np.bincount(powers, minlength=len(self._lengths))

    # ---- the whole file ----------------------------------------------------------------------------------------------

    def _remark_duplicates(self) -> None:
        for code, repeats in zip(("duplicate_rows", "duplicate_prompts"), self._duplicates.found(), strict=True):
            for line, earlier in repeats.examples:
                self.findings.add(code, self._source.place(line, None), f"as {self._source.place(earlier, None)}")
            if repeats.count > len(repeats.examples):
                self.findings.add(code, "", count=repeats.count - len(repeats.examples))

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
    chats: Chats

    def contents(self) -> list[tuple[str, ...]]:
        """The contents of each row's messages."""
        remaining = iter(self.chats.contents)
        return [tuple(islice(remaining, size)) for size in self.chats.sizes]

    def texts(self) -> list[tuple[str, ...]]:
        """All that is said in each row, the last message last: contents, tools, calls."""
        said = self.contents()
        if self.chats.tools is not None:
            said = [(tools, *row) if tools else row for tools, row in zip(self.chats.tools, said, strict=True)]
        if self.chats.extras is not None:
            remaining = iter(self.chats.extras)
            calls = [tuple(islice(remaining, size)) for size in self.chats.sizes]
            said = [
                (*row[:-1], *(extra.tool_calls for extra in extras[:-1] if extra.tool_calls), last)
                for row, extras in zip(said, calls, strict=True)
                for last in (row[-1] + (extras[-1].tool_calls or ""),)
            ]
        return said

    def calls_last(self, at: int) -> bool:
        """Whether the row ends in a call of a tool."""
        extras = self.chats.extras
        return extras is not None and bool(extras[sum(self.chats.sizes[: at + 1]) - 1].tool_calls)

    def rows(self) -> list[Chat]:
        """The rows as the chat template takes them."""
        messages: list[dict[str, Any]] = [
            {"role": role, "content": text} for role, text in zip(self.chats.roles, self.chats.contents, strict=True)
        ]
        for message, extra in zip(messages, self.chats.extras or (), strict=False):
            message.update({name: value for name, value in extra._asdict().items() if value is not None})
            if extra.tool_calls:
                message["tool_calls"] = json.loads(extra.tool_calls)
        tools = self.chats.tools or [None] * len(self.chats.sizes)
        remaining = iter(messages)
        return [
            Chat(list(islice(remaining, size)), json.loads(listed) if listed else None)
            for size, listed in zip(self.chats.sizes, tools, strict=True)
        ]

    def chosen(self, keep: Sequence[bool]) -> _Batch:
        """The rows for which `keep` holds."""
        of_message = [kept for kept, size in zip(keep, self.chats.sizes, strict=True) for _ in range(size)]
        extras, tools = self.chats.extras, self.chats.tools
        return _Batch(
            list(compress(self.lines, keep)),
            list(compress(self.numbers, keep)),
            Chats(
                list(compress(self.chats.roles, of_message)),
                list(compress(self.chats.contents, of_message)),
                list(compress(self.chats.sizes, keep)),
                list(compress(extras, of_message)) if extras is not None else None,
                list(compress(tools, keep)) if tools is not None else None,
            ),
        )


def batched(good: Sequence[Row]) -> list[Chat]:
    """Converted rows as the chat template takes them."""
    return _Batch(range(len(good)), range(len(good)), shapes.flat(good)).rows()


def _parts(batch: _Batch) -> Iterator[slice]:
    """The batch cut where tokenising is due a look at whether to go on."""
    begin = characters = 0
    remaining = iter(map(len, batch.chats.contents))
    for at, size in enumerate(batch.chats.sizes):
        characters += sum(islice(remaining, size))
        if at + 1 - begin >= TOKENIZE_ROWS or characters >= TOKENIZE_CHARACTERS:
            yield slice(begin, at + 1)
            begin, characters = at + 1, 0
    if begin < len(batch.chats.sizes):
        yield slice(begin, len(batch.chats.sizes))


@dataclass(frozen=True, slots=True)
class _Columns:
    """Chats as columns of the normalised file, and the parts that `messages` is made of."""

    messages: pa.Array
    tools: pa.Array
    parts: tuple[pa.Array, ...]
    offsets: npt.NDArray[np.int32]

    def bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of each row's contents."""
        found: npt.NDArray[np.int64] = np.diff(_ends(self.parts[1])[self.offsets]).astype(np.int64)
        return found


def _columns(chats: Chats) -> _Columns | None:
    """The chats as columns; None when one holds text that is not Unicode."""
    offsets = np.zeros(len(chats.sizes) + 1, dtype=np.int32)
    np.cumsum(chats.sizes, out=offsets[1:])
    count = len(chats.roles)
    try:
        parts = [pa.array(texts, pa.string()) for texts in (chats.roles, chats.contents)]
        if chats.extras is None:
            parts += [pa.nulls(count, rows.MESSAGE.field(name).type) for name in Extra._fields]
        else:
            parts += [
                pa.array([extra[at] for extra in chats.extras], rows.MESSAGE.field(name).type)
                for at, name in enumerate(Extra._fields)
            ]
        tools = pa.array(chats.tools or [None] * len(chats.sizes), pa.string())
    except UnicodeEncodeError:
        return None
    messages = pa.StructArray.from_arrays(parts, fields=list(rows.MESSAGE))
    messages = pa.ListArray.from_arrays(pa.array(offsets), messages, type=rows.SCHEMA.field("messages").type)
    return _Columns(messages, tools, tuple(parts), offsets)


class _ContentHash:
    """SHA-256 of the normalised rows, whatever the format and the blocks in which they came."""

    def __init__(self) -> None:
        # One for each stream of values: what it gets does not depend on where blocks begin.
        self._sizes, self._more = hashlib.sha256(), hashlib.sha256()
        self._lengths, self._texts = ([hashlib.sha256(), hashlib.sha256()] for _ in range(2))
        self._rows = self._messages = 0

    def add(self, chats: Chats, columns: _Columns) -> None:
        self._sizes.update(np.diff(columns.offsets))
        for part, lengths, text in zip(columns.parts[:2], self._lengths, self._texts, strict=True):
            ends = _ends(part)
            lengths.update(np.diff(ends))
            if ends[-1]:
                text.update(memoryview(part.buffers()[2])[: ends[-1]])
        for at, extra in enumerate(chats.extras or ()):
            if extra != Extra():
                self._more.update(f"{self._messages + at} {json.dumps(extra)}\n".encode())
        for at, tools in enumerate(chats.tools or ()):
            if tools:
                self._more.update(f"tools {self._rows + at} {json.dumps(tools)}\n".encode())
        self._rows += len(chats.sizes)
        self._messages += len(chats.roles)

    def digest(self) -> str:
        parts = (self._sizes, self._more, *self._lengths, *self._texts)
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()


def _ends(texts: pa.Array) -> npt.NDArray[np.int32]:
    """Where each text ends in the array's bytes, 0 before the first."""
    if not len(texts):
        return np.zeros(1, np.int32)
    return np.frombuffer(texts.buffers()[1], np.int32)[: len(texts) + 1]


def _encoding_fault(text: str) -> Fault | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return readers.not_utf8(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            return Fault("not_utf8", "half of a surrogate pair (\\ud800 to \\udfff) stands alone in the text")
    return None
