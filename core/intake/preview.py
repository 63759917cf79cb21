"""A look at a file before it is uploaded: what it is, how its columns would be read, its first rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.api import schemas
from core.errors import Invalid
from core.intake import checks, readers, shapes, source
from core.intake.findings import REASONS, Fault
from core.intake.rows import Chat
from core.intake.shapes import Extra, Row, Shape
from core.intake.tokenizer import Tokenizer

ROWS = 10
_EXAMPLE = 120


def look(
    path: Path,
    filename: str,
    columns: Mapping[str, str] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    partial: bool = False,
) -> schemas.DatasetPreview:
    """The file's first rows under the mapping `columns` (role → column), and what the upload would refuse of them; with
    a tokenizer that is also what its chat template does not take. `partial`: it is only the beginning of the file, so
    what is wrong with its end is left out.

    Raises Invalid for content that is not read at all and for a mapping that names what is not there.
    """
    mapping = dict(columns or {})
    shapes.check_mapping(mapping)
    found = source.identify(path, filename, known_names=lambda names: shapes.known_names(names, mapping))
    numbered: list[tuple[int, Any]] = []
    for block in map(readers.parsed, found.blocks(found.columns or ())):
        numbered += zip(block.lines, block.records, strict=True)
        if len(numbered) > ROWS:
            break
    if partial and len(numbered) <= ROWS and numbered and isinstance(numbered[-1][1], Fault):
        numbered.pop()
    numbered = numbered[:ROWS]
    if not numbered and not partial:
        raise Invalid("empty_file", f"{filename} has no rows to train on. Upload a file with rows.", "file")
    records = [record for _, record in numbered if not isinstance(record, Fault)]
    names = found.columns or tuple(
        dict.fromkeys(name for record in records if isinstance(record, dict) for name in record)
    )
    shape = shapes.detect(names, records, mapping)
    shown, faults = _converted(shape, numbered, found.place, tokenizer)
    return schemas.DatasetPreview(
        container=found.name,
        format=shape.name if shape is not None else None,
        columns=[_column(name, records) for name in names],
        mapping=_whole(shape.columns) if shape is not None else {},
        roles=list(shapes.COLUMN_ROLES),
        rows=shown,
        faults=faults,
    )


def _converted(
    shape: Shape | None,
    numbered: Sequence[tuple[int, Any]],
    place: Callable[[int, int | None], str],
    tokenizer: Tokenizer | None,
) -> tuple[list[schemas.DatasetRow], list[str]]:
    good: list[Chat] = []
    faults: list[str] = []
    for number, (line, record) in enumerate(numbered, 1):
        row = record if isinstance(record, Fault) or shape is None else shape.convert(record)
        fault = row if isinstance(row, Fault) else None
        if isinstance(row, Row):
            good.append(_chat(row))
            fault = checks.encoding_fault(row)
            if fault is None and tokenizer is not None:
                try:
                    fault = _refused(good[-1], tokenizer)
                except Invalid as error:  # whatever the row; another column may do, so the file is shown all the same
                    faults.append(error.message)
                    tokenizer = None
        if fault is not None:
            faults.append(f"{place(line, number)}: {fault.what}. {REASONS[fault.code].remedy}")
    return [
        schemas.DatasetRow(
            index=index, messages=[schemas.DatasetMessage(**message) for message in chat.messages], tools=chat.tools
        )
        for index, chat in enumerate(good)
    ], faults


def _refused(row: Chat, tokenizer: Tokenizer) -> Fault | None:
    found = checks.encoded(row, tokenizer)
    return found if isinstance(found, Fault) else None


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
