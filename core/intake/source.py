"""What an uploaded file is, by its content. Its name only decides where the content leaves it open."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from core.errors import Invalid
from core.intake import readers
from core.intake.readers import BOM, Block
from core.intake.stream import PACKINGS, Stream

HEAD_BYTES = 256 << 10
SAMPLE_LINES = 20
READABLE = (
    "Read are JSONL, JSON, CSV and TSV with a header line, Parquet, Arrow and, under a name that ends in .txt, plain "
    "text; gzip and zstd are unpacked"
)
_UNREADABLE = {
    b"PK\x03\x04": "a zip archive (an Excel workbook is one, too): unpack it, or save the sheet as CSV",
    b"BZh": "compressed with bzip2: unpack it",
    b"\xfd7zXZ": "compressed with xz: unpack it",
    b"%PDF": "a PDF: extract its text",
    b"\x80\x04": "a Python pickle, which is never loaded: export the data as JSONL",
    b"\x80\x05": "a Python pickle, which is never loaded: export the data as JSONL",
}
_WIDE_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32LE",
    b"\x00\x00\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A file whose content is known: `name` of the container for people; `columns`, where the format fixes them for
    all rows; `blocks(columns)` reads it, a table only in these columns; `place(line, number)` names a row, whose number
    may be None."""

    name: str
    columns: tuple[str, ...] | None
    blocks: Callable[[Sequence[str]], Iterator[Block]]
    place: Callable[[int, int | None], str]


def identify(path: Path, filename: str, *, known_names: Callable[[Sequence[str]], int]) -> Source:
    """Find out what the file is. `filename` is the name under which it was uploaded; `known_names` says how many of a
    header's fields name a column that the caller knows.

    Raises Invalid for an empty file and for content that is not read, with what it is and what to do about it.
    """
    with Stream(path, filename) as stream:
        head = _read_head(stream)
        packing = stream.packing
    if not head:
        raise _empty(filename, "is empty")
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        return _table(path, filename, packing, parquet=head.startswith(b"PAR1"))
    for magic, what in _UNREADABLE.items():
        if head.startswith(magic):
            raise _unknown(filename, f"is {what}")
    for magic, inner in PACKINGS.items():
        if head.startswith(magic):
            raise _unknown(filename, f"is {inner} inside {packing}: unpack it once")
    _check_encoding(head, filename)
    source = _text(path, filename, head.removeprefix(BOM), known_names)
    return Source(f"{source.name}, {packing}", source.columns, source.blocks, source.place) if packing else source


def _read_head(stream: Stream) -> bytes:
    head = b""
    while len(head) < HEAD_BYTES and (more := stream.read(HEAD_BYTES - len(head))):
        head += more
    return head


def _empty(filename: str, why: str) -> Invalid:
    return Invalid("empty_file", f"{filename} {why}: there is nothing to train on. Upload a file with rows.", "file")


def _unknown(filename: str, what: str) -> Invalid:
    return Invalid("unknown_format", f"{filename} {what}. {READABLE}.", "file")


def _check_encoding(head: bytes, filename: str) -> None:
    encoding = next((name for magic, name in _WIDE_ENCODINGS.items() if head.startswith(magic)), None)
    if encoding is None and b"\0" in head:
        encoding = next((name for name in ("UTF-16LE", "UTF-16BE") if _reads_as(head[:1024], name)), None)
        if encoding is None:
            raise _unknown(filename, "is binary data of an unknown kind: export it as JSONL")
    if encoding:
        raise Invalid(
            "not_utf8",
            f"{filename} is {encoding} text and must be UTF-8. Convert it with iconv -f {encoding} -t UTF-8.",
            "file",
        )


def _reads_as(data: bytes, encoding: str) -> bool:
    text = data.decode(encoding, "replace")
    return sum(letter.isascii() and (letter.isprintable() or letter.isspace()) for letter in text) > 0.8 * len(text)


def _table(path: Path, filename: str, packing: str, *, parquet: bool) -> Source:
    if packing:
        raise _unknown(filename, f"is a table inside {packing}, and compressed itself: unpack it")
    names = readers.table_columns(path, filename)
    return Source(
        "Parquet" if parquet else "Arrow",
        names,
        lambda columns: readers.table(path, filename, columns=columns),
        lambda line, number: f"row {line}",
    )


def _text(path: Path, filename: str, head: bytes, known_names: Callable[[Sequence[str]], int]) -> Source:
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    if not lines:
        raise _empty(filename, "has blank lines only")
    suffixes = {suffix.lower() for suffix in Path(filename).suffixes}
    begins = lines[0][:1]
    if begins in b"{[" or (begins == b'"' and _parsed(lines[0]) is not None):
        return _json(path, filename, head, lines)
    delimiter, header = _header(head, known_names)
    if known_names(header) or suffixes & {".csv", ".tsv", ".tab"}:
        return Source(
            "TSV" if delimiter == "\t" else "CSV",
            tuple(header),
            lambda _: readers.separated(path, filename, delimiter=delimiter, names=header),
            partial(_numbered, "record"),
        )
    if suffixes & {".txt", ".text"}:
        _check_line_ends(head, lines, filename)
        return Source("plain text", ("text",), _ignoring_columns(readers.text, path, filename), _line)
    begin = lines[0][:40].decode("utf-8", "replace")
    raise _unknown(filename, f"begins with {begin!r}, which is neither JSON nor a header line with known column names")


def _json(path: Path, filename: str, head: bytes, lines: Sequence[bytes]) -> Source:
    if _has_a_value_per_line(lines):
        _check_line_ends(head, lines, filename)
        return Source("JSONL", None, _ignoring_columns(readers.jsonl, path, filename), _line)
    reader = readers.json_list if lines[0].startswith(b"[") else readers.json_objects
    return Source("JSON", None, _ignoring_columns(reader, path, filename), partial(_numbered, "row"))


def _check_line_ends(head: bytes, lines: Sequence[bytes], filename: str) -> None:
    if len(lines) > 1 and b"\n" not in head:
        raise Invalid(
            "line_ends",
            f"{filename} ends its lines with carriage returns alone, as old Macs did, and would be one row. Convert it "
            r"with tr '\r' '\n'.",
            "file",
        )


def _ignoring_columns(
    reader: Callable[[Path, str], Iterator[Block]], path: Path, filename: str
) -> Callable[[Sequence[str]], Iterator[Block]]:
    read = partial(reader, path, filename)
    return lambda columns: read()


def _line(line: int, number: int | None) -> str:
    return f"line {line}"


def _numbered(what: str, line: int, number: int | None) -> str:
    return f"line {line}" if number is None else f"line {line} ({what} {number})"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _has_a_value_per_line(lines: Sequence[bytes]) -> bool:
    if lines[0].startswith(b"["):
        # A list of rows is one JSON value, on however many lines; a list of turns is a row.
        value = _parsed(lines[0])
        return bool(value) and isinstance(value[0], dict) and not {"role", "from"}.isdisjoint(value[0])
    if lines[0].endswith(b"}") or isinstance(_parsed(lines[0]), str):
        return True
    # The first line is no whole object: one of the rows that are broken, or the beginning of one over several lines.
    others = lines[1:SAMPLE_LINES]
    return 2 * sum(isinstance(_parsed(line), dict) for line in others) > len(others)


def _header(head: bytes, known_names: Callable[[Sequence[str]], int]) -> tuple[str, list[str]]:
    """Delimiter and fields of the first record: of the delimiters the one with the most known names, then fields."""
    text = head.decode("utf-8", "replace")
    found = [(delimiter, _first_record(text, delimiter)) for delimiter in (",", "\t", ";", "|")]
    return max(found, key=lambda entry: (known_names(entry[1]), len(entry[1])))


def _first_record(text: str, delimiter: str) -> list[str]:
    try:
        records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        first = next((record for record in records if record and not readers.names_delimiter(record)), [])
        return [name.strip() for name in first]
    except csv.Error:
        return []
