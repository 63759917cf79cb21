from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.api import schemas
from core.errors import Invalid
from core.intake import preview, tokenizer
from core.intake.dataset import InvalidDataset, ingest
from core.intake.findings import REASONS
from tests.intake import models
from tests.machine import ROOT


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


TOOLS = (ROOT / "sample_data" / "odd" / "tools_openai.jsonl").read_text()
SYSTEM = '{"prompt": "Who?", "completion": "I.", "system": "Be brief."}\n'
PAIR = '{"prompt": "Who?", "completion": "I."}\n'
HALF = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
                   "tools": [{"name": "f\ud800"}]}) + "\n"  # fmt: skip


@pytest.mark.parametrize(
    ("template", "content", "code"),
    [
        (models.CHATML, TOOLS, "tools"), (models.MODEL_TURNS, PAIR + SYSTEM, "chat_template"),
        (models.FORCED_REASONING, PAIR, "chat_template"), (models.TOOLS, HALF, "not_utf8"),
    ],
)  # fmt: skip
def test_what_the_chat_template_does_not_take_is_told_as_the_upload_tells_it(
    tmp_path: Path, template: str, content: str, code: str
) -> None:
    tok = tokenizer.load(models.write(tmp_path / "model", template))
    found = look(tmp_path, content, tokenizer=tok)
    with pytest.raises(InvalidDataset) as refused:
        ingest(tmp_path / "a.jsonl", tmp_path / "a.parquet", filename="a.jsonl", tokenizer=tok)
    assert refused.value.report is not None
    (finding,) = refused.value.report.findings
    assert finding.code == code
    assert found.faults == [f"{example}. {REASONS[code].remedy}" for example in finding.examples]
    assert len(found.rows) == content.count("\n"), "they are shown all the same"
    good = tokenizer.load(models.write(tmp_path / "good", models.TOOLS))
    assert code == "not_utf8" or look(tmp_path, content, tokenizer=good).faults == []


def test_what_is_wrong_with_the_model_is_told_once_and_plain_text_can_still_be_chosen(tmp_path: Path) -> None:
    tok = tokenizer.load(models.write(tmp_path / "base", None))
    found = look(tmp_path, PAIR * 3, tokenizer=tok)
    (fault,) = found.faults
    assert "has no chat template" in fault and len(found.columns) == 2
    assert look(tmp_path, PAIR * 3, tokenizer=tok, columns={"text": "completion"}).faults == []


def test_of_a_beginning_the_row_that_is_cut_is_left_out(tmp_path: Path) -> None:
    content = '{"prompt": "1", "completion": "2"}\n{"prompt": "3", "comp'
    assert look(tmp_path, content, partial=True).faults == []
    assert len(look(tmp_path, content).faults) == 1
    whole = json.dumps([{"prompt": "1", "completion": "2"}] * 3)
    cut = look(tmp_path, whole[:-20], "a.json", partial=True)
    assert (len(cut.rows), cut.faults) == (2, [])


def test_what_the_report_will_remark_is_told_before_the_upload(tmp_path: Path) -> None:
    tok = tokenizer.load(models.write(tmp_path / "model", models.CHATML))
    pairs = [("Who are you?", "I am the captain of this ship.", 1), ("Who are you?", "Nobody.", 2), ("", "Aye", 3),
             ("Was ist das?", " ", 4), ("Why is the sea <|im_end|>?", "It is the sky.", 5), (7, "Seven.", 6),
             ("Who are you?", "I am the captain of this ship.", 7)]  # fmt: skip
    content = "".join(json.dumps({"prompt": p, "completion": c, "id": n}) + "\n" for p, c, n in pairs)
    found = look(tmp_path, content, tokenizer=tok)
    report = ingest(tmp_path / "a.jsonl", tmp_path / "a.parquet", filename="a.jsonl", tokenizer=tok)
    assert {finding.code for finding in report.findings} == {
        "duplicate_rows", "duplicate_prompts", "empty_answer", "empty_prompt", "number_as_text", "control_token",
        "unused_columns",
    }  # fmt: skip
    assert sorted(found.findings, key=lambda one: one.code) == sorted(report.findings, key=lambda one: one.code)
    assert (found.looked_at, found.whole, found.faults) == (7, True, [])
    assert (found.languages, found.longest_row_tokens) == (report.languages, report.longest_row_tokens)


def test_remarks_are_of_the_first_rows_and_of_no_row_that_is_cut(tmp_path: Path) -> None:
    content = "".join(f"{n}?,{n}.\n" for n in range(preview.LOOKED_AT + 5))
    found = look(tmp_path, "prompt,completion\n" + content, "a.csv")
    assert (found.looked_at, found.whole, len(found.rows)) == (preview.LOOKED_AT, False, preview.ROWS)
    assert found.findings == []
    cut = look(tmp_path, "prompt,completion\n1?,One.\n2?,", "a.csv", partial=True)
    assert (cut.looked_at, cut.whole, cut.findings) == (1, False, [])
