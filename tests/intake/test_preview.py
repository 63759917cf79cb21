from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.api import schemas
from core.errors import Invalid
from core.intake import preview


def look(tmp_path: Path, content: str | bytes, name: str = "a.jsonl", **options: Any) -> schemas.DatasetPreview:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return preview.look(path, name, options.pop("columns", None), **options)


def test_a_file_is_shown_as_it_would_be_read(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"question": f"{n}?", "answer": f"{n}.", "id": n}) + "\n" for n in range(40))
    found = look(tmp_path, rows)
    assert (found.container, found.format) == ("JSONL", "prompt/completion")
    assert found.mapping == {"prompt": "question", "completion": "answer"}
    assert [(column.name, column.kind, column.example) for column in found.columns][2] == ("id", "a number", "0")
    assert len(found.rows) == preview.ROWS
    assert [message.content for message in found.rows[3].messages] == ["3?", "3."]


def test_half_characters_and_deep_values_are_shown_all_the_same(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f\ud800", "arguments": {"a": "\ud800"}}}]}]  # fmt: skip
    record = {"messages": turns, "tools": [{"name": "f\ud800"}], "\ud800": {"a": "\ud800"}}
    found = look(tmp_path, json.dumps(record) + "\n")
    assert found.model_dump_json().encode()
    assert "?" in found.columns[-1].name
    assert look(tmp_path, '{"prompt": ' + "[" * 900 + "]" * 900 + ', "completion": "x"}\n').model_dump_json()


def test_unknown_columns_are_shown_to_be_mapped_and_a_mapping_is_tried(tmp_path: Path) -> None:
    content = "frage,reaktion\nWer?,Ich.\n"
    found = look(tmp_path, content, "a.csv")
    assert (found.format, found.rows, found.mapping) == (None, [], {})
    assert [column.name for column in found.columns] == ["frage", "reaktion"]
    assert {"prompt", "completion", "messages"} <= set(found.roles)
    mapped = look(tmp_path, content, "a.csv", columns={"prompt": "frage", "completion": "reaktion"})
    assert mapped.rows[0].messages[1].content == "Ich."
    with pytest.raises(Invalid, match="names column 'antwort'"):
        look(tmp_path, content, "a.csv", columns={"prompt": "antwort"})


def test_faulty_rows_are_named_and_the_others_shown(tmp_path: Path) -> None:
    found = look(
        tmp_path,
        '{"prompt": "1", "completion": "2"}\n{"prompt": "3"}\n{"prompt": \n{"prompt": "\\ud800", "completion": "x"}\n',
    )
    assert len(found.rows) == 2
    assert found.faults[0].startswith("line 2: no field 'completion'")
    assert found.faults[1].startswith("line 3: Expecting value")
    assert found.faults[2].startswith("line 4: half of a surrogate pair")


def test_what_the_upload_refuses_is_told_before_it(tmp_path: Path) -> None:
    found = look(tmp_path, "question,answer\nGrüße?,Schöne\nWo?,Da\n".encode("cp1252"), "a.csv")
    (fault,) = found.faults
    assert fault.startswith("line 2 (record 1): byte 0xfc is not UTF-8; it looks like WINDOWS-1252")
    with pytest.raises(Invalid, match="no rows to train on"):
        look(tmp_path, "question,answer\n", "a.csv")
    assert look(tmp_path, "question,answer\n", "a.csv", partial=True).faults == []


def test_of_a_beginning_the_row_that_is_cut_is_left_out(tmp_path: Path) -> None:
    content = '{"prompt": "1", "completion": "2"}\n{"prompt": "3", "comp'
    assert look(tmp_path, content, partial=True).faults == []
    assert len(look(tmp_path, content).faults) == 1
    whole = json.dumps([{"prompt": "1", "completion": "2"}] * 3)
    cut = look(tmp_path, whole[:-20], "a.json", partial=True)
    assert (len(cut.rows), cut.faults) == (2, [])
