"""A look at a file before it is uploaded: what it is, how its columns would be read, its first rows, and what the
upload's report would say of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from core.api import schemas
from core.errors import Invalid
from core.intake import checks, languages, readers, shapes, source
from core.intake import columns as columns_of
from core.intake.duplicates import Duplicates
from core.intake.findings import REASONS, Fault, Findings
from core.intake.rows import Chat
from core.intake.shapes import Extra, Row, Shape
from core.intake.tokenizer import Tokenizer

ROWS = 10
"""Rows that are shown."""
LOOKED_AT = 500
"""Rows that are checked."""
_EXAMPLE = 120


def look(
    path: Path,
    filename: str,
    columns: Mapping[str, str] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    partial: bool = False,
) -> schemas.DatasetPreview:
    """The file's first rows under the mapping `columns` (role → column), and what the upload would refuse and remark of
    them; with a tokenizer that is also what its chat template does not take. `partial`: it is only the beginning of the
    file, so what is wrong with its end is left out.

    Raises Invalid for content that is not read at all and for a mapping that names what is not there.
    """
    mapping = dict(columns or {})
    shapes.check_mapping(mapping)
    found = source.identify(path, filename, known_names=lambda names: shapes.known_names(names, mapping))
    numbered: list[tuple[int, Any]] = []
    for block in map(readers.parsed, found.blocks(found.columns or ())):
        numbered += zip(block.lines, block.records, strict=True)
        if len(numbered) > LOOKED_AT:
            break
    to_the_end = len(numbered) <= LOOKED_AT
    if partial and to_the_end and numbered and (len(numbered) > 1 or isinstance(numbered[-1][1], Fault)):
        numbered.pop()  # cut somewhere, even where what is left can be read
    numbered = numbered[:LOOKED_AT]
    if not numbered and not partial:
        raise Invalid("empty_file", f"{filename} has no rows to train on. Upload a file with rows.", "file")
    records = [record for _, record in numbered if not isinstance(record, Fault)]
    names = found.columns or tuple(
        dict.fromkeys(name for record in records if isinstance(record, dict) for name in record)
    )
    shape = shapes.detect(names, records, mapping)
    good, faults, longest = _converted(shape, numbered, found.place, tokenizer)
    findings, languages_seen = _remarks(good, found.place, tokenizer, path.parent)
    unused = [name for name in names if name not in shape.columns.values()] if shape is not None else []
    if unused:
        findings.add("unused_columns", _whole(shapes.shown(unused)), count=len(unused))
    return schemas.DatasetPreview(
        container=found.name,
        format=shape.name if shape is not None else None,
        columns=[_column(name, records) for name in names],
        mapping=_whole(shape.columns) if shape is not None else {},
        roles=list(shapes.COLUMN_ROLES),
        rows=_shown(good),
        faults=faults[:ROWS],
        looked_at=len(numbered),
        whole=to_the_end and not partial,
        findings=findings.listed(),
        languages=dict(languages_seen.most_common()),
        longest_row_tokens=longest,
    )


class _Good(NamedTuple):
    """A row that could be read: where, and whether the upload takes it."""

    line: int
    number: int
    row: Row
    taken: bool


def _converted(
    shape: Shape | None,
    numbered: Sequence[tuple[int, Any]],
    place: Callable[[int, int | None], str],
    tokenizer: Tokenizer | None,
) -> tuple[list[_Good], list[str], int | None]:
    """The rows that could be read, what is wrong with the others and with some of them, tokens of the longest."""
    good: list[_Good] = []
    faults: list[str] = []
    longest: int | None = None
    for number, (line, record) in enumerate(numbered, 1):
        row = record if isinstance(record, Fault) or shape is None else shape.convert(record)
        fault = row if isinstance(row, Fault) else None
        if isinstance(row, Row):
            fault = checks.encoding_fault(row)
            if fault is None and tokenizer is not None:
                try:
                    found = checks.encoded(_chat(row), tokenizer)
                    if isinstance(found, Fault):
                        fault = found
                    else:
                        longest = max(longest or 0, len(found.ids))
                except Invalid as error:  # whatever the row; another column may do, so the file is shown all the same
                    faults.append(error.message)
                    tokenizer = None
            good.append(_Good(line, number, row, fault is None))
        if fault is not None:
            faults.append(f"{place(line, number)}: {fault.what}. {REASONS[fault.code].remedy}")
    return good, faults, longest


def _shown(good: Sequence[_Good]) -> list[schemas.DatasetRow]:
    chats = [_chat(one.row) for one in good[:ROWS]]
    return [
        schemas.DatasetRow(
            index=index, messages=[schemas.DatasetMessage(**message) for message in chat.messages], tools=chat.tools
        )
        for index, chat in enumerate(chats)
    ]


def _remarks(
    good: Sequence[_Good], place: Callable[[int, int | None], str], tokenizer: Tokenizer | None, folder: Path
) -> tuple[Findings, Counter[str]]:
    """What the upload's report would remark of the rows that it takes, as `dataset` does; and their languages."""
    findings, seen = Findings(), Counter[str]()
    taken = [one for one in good if one.taken]
    found = columns_of.of_chats(shapes.flat([one.row for one in taken]))
    if found is None or not taken:
        return findings, seen
    for line, number, row, _ in taken:
        if row.numbers:
            findings.add("number_as_text", place(line, number))
    for code, at, what in checks.remarks(found, checks.controls_of(tokenizer) if tokenizer is not None else None):
        findings.add(code, place(taken[at].line, taken[at].number), what)
    for at in range(len(found)):
        seen[languages.language(" ".join(reversed(found.texts(at))))] += 1
    with closing(Duplicates(folder)) as duplicates:
        duplicates.add([one.line for one in taken], *found.hashes())
        checks.remark_duplicates(findings, duplicates, place)
    return findings, seen


def _chat(row: Row) -> Chat:
    messages: list[dict[str, Any]] = []
    for role, content, extra in zip(row.roles, row.contents, row.extras or (Extra(),) * len(row.roles), strict=True):
        more = {name: value for name, value in extra._asdict().items() if value is not None}
        if extra.tool_calls:
            more["tool_calls"] = json.loads(extra.tool_calls)
        messages.append({"role": role, "content": content, **more})
    return Chat(_whole(messages), _whole(json.loads(row.tools)) if row.tools else None)


def _whole(value: Any) -> Any:
    """With every text in whole characters: what is not Unicode is refused by the upload, and has no place in an
    answer."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_whole(name): _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, TypeError, ValueError):  # too deep, or with keys that JSON does not have
        return "…"


def _column(name: str, records: Sequence[Any]) -> schemas.DatasetColumn:
    value = next((r[name] for r in records if isinstance(r, dict) and r.get(name) is not None), None)
    text = value if isinstance(value, str) else _written(value)
    example = text[:_EXAMPLE] + "…" * (len(text) > _EXAMPLE)
    return schemas.DatasetColumn(name=_whole(name), kind=shapes.kind(value), example=_whole(example))
