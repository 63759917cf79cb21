from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.api import schemas
from core.errors import Invalid
from core.intake import chat, dataset, readers, rows, shapes, tokenizer
from core.intake.dataset import InvalidDataset, ingest
from core.intake.tokenizer import Tokenizer
from tests.intake import models

SAMPLES = Path(__file__).parents[2] / "sample_data"


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer.load(models.write(tmp_path_factory.mktemp("model"), models.CHATML))


class Inbox:
    """Takes content in, from a file of the name given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored = folder / "stored" / "rows.parquet"

    def take(self, content: str | bytes, name: str = "data.jsonl", **options: Any) -> schemas.DatasetReport:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return ingest(path, self.stored, filename=name, **{"tokenizer": None, **options})

    def refused(self, content: str | bytes, name: str = "data.jsonl", **options: Any) -> InvalidDataset:
        with pytest.raises(InvalidDataset) as caught:
            self.take(content, name, **options)
        assert not self.stored.exists()
        return caught.value

    def messages(self) -> list[list[tuple[str, str]]]:
        return [[(m.role, m.content) for m in row.messages] for row in rows.read(self.stored, 0, 10_000)]


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path)


def jsonl(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def pair(prompt: Any = "One?", completion: Any = "Two.") -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion}


def finding(report: schemas.DatasetReport, code: str) -> schemas.Finding:
    return next(finding for finding in report.findings if finding.code == code)


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_the_sample_is_taken_without_remark(tmp_path: Path, tok: Tokenizer) -> None:
    report = ingest(SAMPLES / "captain.jsonl", tmp_path / "rows", filename="captain.jsonl", tokenizer=tok)
    assert report.format == "prompt/completion (JSONL)"
    assert (report.rows, report.rows_read, report.findings) == (217, 217, [])


def test_an_alpaca_input_follows_the_instruction(inbox: Inbox) -> None:
    inbox.take(
        json.dumps(
            [
                {"instruction": "Add.", "input": "1 and 2", "output": "3"},
                {"instruction": "Greet.", "input": "", "output": "Hi."},
                {"instruction": "Leave.", "input": None, "output": "Bye.", "system": "Be brief."},
            ]
        ),
        "alpaca.json",
    )
    assert inbox.messages() == [
        [("user", "Add.\n\n1 and 2"), ("assistant", "3")],
        [("user", "Greet."), ("assistant", "Hi.")],
        [("system", "Be brief."), ("user", "Leave."), ("assistant", "Bye.")],
    ]


@pytest.mark.parametrize(
    ("record", "format_name"),
    [
        ({"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]}, "ShareGPT (JSONL)"),
        ({"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]},
         "OpenAI chat (JSONL)"),
        ([{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}], "OpenAI chat (JSONL)"),
        ({"prompt": "One?", "completion": "Two."}, "prompt/completion (JSONL)"),
        ({"question": "One?", "answer": "Two."}, "prompt/completion (JSONL)"),
        ({"Input": "One?", "OUTPUT": "Two."}, "prompt/completion (JSONL)"),
        ({"instruction": "One?", "response": "Two."}, "alpaca (JSONL)"),
    ],
)  # fmt: skip
def test_every_shape_gives_the_same_chat(inbox: Inbox, record: Any, format_name: str) -> None:
    assert inbox.take(jsonl(record)).format == format_name
    assert inbox.messages() == [[("user", "One?"), ("assistant", "Two.")]]


def test_a_system_text_beside_the_chat_comes_first(inbox: Inbox) -> None:
    turns = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]
    inbox.take(jsonl({"system": "Be brief.", "conversations": turns}, {"system": "", "conversations": turns}))
    assert [row[0] for row in inbox.messages()] == [("system", "Be brief."), ("user", "One?")]


def test_csv_json_and_parquet_of_the_same_data_give_the_same_rows(inbox: Inbox) -> None:
    records = [
        {"instruction": 'Say "yes",\nthen no.', "input": "", "output": "yes, no"},
        {"instruction": "Größe?", "input": "42", "output": "  spaces kept  "},
    ]
    found = []
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"):
        path = inbox.folder / name
        if name.endswith(("csv", "tsv")):
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(records[0]), delimiter="\t" if name.endswith("tsv") else ",")
                writer.writeheader()
                writer.writerows(records)
        elif name.endswith("parquet"):
            pq.write_table(pa.Table.from_pylist(records), path)
        else:
            path.write_text(jsonl(*records) if name.endswith("l") else json.dumps(records))
        ingest(path, inbox.stored, filename=name, tokenizer=None)
        found.append(inbox.messages())
    assert all(messages == found[0] for messages in found)
    assert found[0][1][1] == ("assistant", "  spaces kept  ")


def test_excels_line_that_names_the_delimiter_is_no_header(inbox: Inbox) -> None:
    text = '\ufeffsep=;\r\ninstruction;output\r\n"One; or two?";"Two, I\nthink"\r\n'
    refused = inbox.refused(text + "Three?\r\n", "faulty.csv")
    assert "line 5 (record 2)" in refused.message, "lines are those of the file"
    inbox.take(text, "excel.csv")
    assert inbox.messages() == [[("user", "One; or two?"), ("assistant", "Two, I\nthink")]]


def test_a_chat_in_a_csv_is_read_from_its_json_text(inbox: Inbox) -> None:
    turns = json.dumps([{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}])
    inbox.take('messages\n"' + turns.replace('"', '""') + '"\n', "chat.csv")
    assert inbox.messages() == [[("user", "One?"), ("assistant", "Two.")]]


def test_plain_text_is_a_row_a_line(inbox: Inbox) -> None:
    assert inbox.take("First.\r\n\r\nSecond.\r\n", "notes.txt").format == "text (plain text)"
    assert inbox.messages() == [[("text", "First.")], [("text", "Second.")]]


def test_the_name_does_not_decide(inbox: Inbox) -> None:
    assert inbox.take(jsonl(pair()), "data.csv").format == "prompt/completion (JSONL)"
    assert inbox.take("prompt,completion\nOne?,Two.\n", "data.json").format == "prompt/completion (CSV)"
    packed = gzip.compress(jsonl(pair()).encode())
    assert inbox.take(packed, "data.json").format == "prompt/completion (JSONL, gzip)"


def test_a_row_of_two_megabytes_is_accepted(inbox: Inbox) -> None:
    long = "word " * 400_000
    uploads = {
        "a.jsonl": jsonl(pair(), pair("Long?", long)),
        "a.json": json.dumps([pair("Long?", long)]),
        "a.csv": f"prompt,completion\nLong?,{long}\n",
    }
    for name, content in uploads.items():
        inbox.take(content, name)
        assert inbox.messages()[-1][1] == ("assistant", long)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_row_that_no_job_could_hold_is_refused_before_it_takes_memory(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1 << 20)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1 << 18)
    field_limit = csv.field_size_limit(1 << 20)
    long = "x" * (3 << 20)
    try:
        if name == "a.parquet":
            pq.write_table(pa.Table.from_pylist([pair("Long?", long)]), inbox.folder / "made")
            error = inbox.refused((inbox.folder / "made").read_bytes(), name)
        else:
            record = pair("Long?", long)
            content = {"a.jsonl": jsonl(record), "a.json": json.dumps([record])}
            error = inbox.refused(content.get(name, f"prompt,completion\nLong?,{long}\n"), name)
    finally:
        csv.field_size_limit(field_limit)
    assert error.code == ("broken_csv" if name == "a.csv" else "record_too_large")


# ---- mapping ---------------------------------------------------------------------------------------------------------


def test_columns_are_mapped_by_role(inbox: Inbox) -> None:
    report = inbox.take("q,a,note\nOne?,Two.,x\n", "odd.csv", columns={"prompt": "q", "completion": "a"})
    assert report.columns == {"prompt": "q", "completion": "a"}
    assert finding(report, "unused_columns").examples == ["'note'"]
    assert inbox.messages() == [[("user", "One?"), ("assistant", "Two.")]]


def test_a_mapping_goes_before_the_usual_names(inbox: Inbox) -> None:
    record = {"prompt": "wrong", "question": "One?", "completion": "Two."}
    assert inbox.take(jsonl(record), columns={"prompt": "question"}).columns["prompt"] == "question"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "nothing"}, "names column 'nothing' for prompt; the file has 'prompt', 'completion'"),
        ({"reply": "completion"}, "column 'completion' the role 'reply'. Roles are messages, instruction"),
    ],
)
def test_a_wrong_mapping_is_explained(inbox: Inbox, columns: dict[str, str], message: str) -> None:
    error = inbox.refused(jsonl(pair()), columns=columns)
    assert message in error.message
    assert error.param == "columns"


def test_unknown_columns_are_listed_with_what_is_needed(inbox: Inbox) -> None:
    error = inbox.refused(jsonl({"title": "x", "body": "y"}))
    assert "has the columns 'title', 'body'" in error.message
    assert "map those roles" in error.message


def test_one_object_around_the_rows_is_recognised(inbox: Inbox) -> None:
    assert "upload that list alone" in inbox.refused(json.dumps({"data": [pair()]}), "data.json").message


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_faulty_row_is_named_with_line_field_what_stood_there_and_remedy(inbox: Inbox) -> None:
    error = inbox.refused(jsonl(pair()) + "\n" + jsonl({"prompt": "Three?", "reply": "Four."}))
    assert error.message == (
        "data.jsonl, line 3: no field 'completion'; there is 'prompt', 'reply'. Add the field, or map its role to "
        "another column. Faulty rows: 1 of 2 (1 missing_field). Nothing was stored."
    )
    assert (error.code, error.param, error.status) == ("missing_field", "file", 422)


def test_what_pandas_writes_for_a_value_that_is_missing_is_no_text(inbox: Inbox) -> None:
    nan = float("nan")
    chat = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    silent = [chat[0], {"role": "assistant", "content": nan}]
    assert "line 1: field 'completion' is NaN" in inbox.refused(jsonl(pair(completion=nan))).message
    assert "field 'content' of message 2 is NaN" in inbox.refused(jsonl({"messages": silent})).message
    for record in (
        {"instruction": "One?", "input": nan, "system": nan, "output": "Two."},
        {"messages": chat, "tools": nan, "system": nan},
    ):
        assert inbox.take(jsonl(record)).findings == []
        assert inbox.messages() == [[("user", "One?"), ("assistant", "Two.")]]


def test_a_number_beside_an_instruction_is_remarked(inbox: Inbox) -> None:
    report = inbox.take(jsonl({"instruction": "Double it.", "input": 2, "output": "Four."}))
    assert finding(report, "number_as_text").examples == ["line 1"]


def test_files_that_were_joined_may_each_begin_with_a_mark(inbox: Inbox) -> None:
    one, other = jsonl(pair()), jsonl(pair("Three?", "Four."))
    assert inbox.take(f"\ufeff{one}\ufeff{other}").rows == 2


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_lines_that_end_in_another_way_are_not_read_as_one(inbox: Inbox, name: str) -> None:
    error = inbox.refused((jsonl(pair()) * 3).replace("\n", "\r"), name)
    assert error.code == "line_ends" and r"tr '\r' '\n'" in error.message


@pytest.mark.parametrize(
    ("text", "encoding"), [("こんにちは", "shift_jis"), ("Привет", "cp1251"), ("你好吗", "gb18030")]
)
def test_no_conversion_is_offered_that_would_spoil_the_text(inbox: Inbox, text: str, encoding: str) -> None:
    error = inbox.refused(f"prompt,completion\n{text},b\n".encode(encoding), "data.csv")
    assert "iconv -f ENCODING -t UTF-8" in error.message and "looks like" not in error.message


def test_the_report_counts_each_reason_and_keeps_three_examples(inbox: Inbox) -> None:
    broken = ['{"prompt": "One?"\n'] * 4
    error = inbox.refused("".join([jsonl(pair()), *broken, jsonl(pair("Three?", None), pair(["x"], "y"), pair())]))
    assert error.report is not None
    assert (error.report.rows, error.report.rows_read) == (2, 8)
    counts = {f.code: (f.level, f.count, len(f.examples)) for f in error.report.findings}
    assert counts == {
        "broken_json": ("error", 4, 3),
        "missing_field": ("error", 1, 1),
        "wrong_type": ("error", 1, 1),
        "duplicate_rows": ("warning", 1, 1),
    }
    assert (
        finding(error.report, "broken_json")
        .examples[0]
        .startswith("line 2: Expecting ',' delimiter at column 18, near")
    )


def test_a_file_without_a_good_row_has_three_places_of_every_reason(inbox: Inbox) -> None:
    error = inbox.refused(jsonl(*[pair("One?", None)] * 5, *[pair("One?", ["Two."])] * 4))
    assert "Faulty rows: 9 of 9 (5 missing_field, 4 wrong_type)" in error.message
    assert error.report is not None
    assert [(found.count, [place.split(":")[0] for place in found.examples]) for found in error.report.findings] == [
        (5, ["line 1", "line 2", "line 3"]), (4, ["line 6", "line 7", "line 8"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"prompt": "One?", "completion": "Two."}'),
        ("a.json", '[{"prompt": "One?", "completion": "Two."}]'),
        ("a.csv", "prompt,completion\nOne?,Two.\n"),
        ("a.txt", "One?\nTwo.\n"),
    ],
)
def test_a_byte_order_mark_is_no_part_of_what_it_stands_before(inbox: Inbox, name: str, content: str) -> None:
    for data in (b"\xef\xbb\xbf" + content.encode(), gzip.compress(b"\xef\xbb\xbf" + content.encode())):
        inbox.take(data, name)
        assert inbox.messages()[0][0][1] == "One?"


def test_a_type_that_changes_is_told_with_both_types(inbox: Inbox) -> None:
    error = inbox.refused(jsonl(pair(), pair("One?", {"text": "Two."}), pair("One?", ["Two."]), pair("One?", True)))
    assert error.report is not None
    assert finding(error.report, "wrong_type").examples == [
        "line 2: field 'completion' is an object here and text elsewhere",
        "line 3: field 'completion' is a list here and text elsewhere",
        "line 4: field 'completion' is true/false here and text elsewhere",
    ]


@pytest.mark.parametrize(
    ("roles", "shown"),
    [
        (["user", "user", "assistant"], "the roles are user, user, assistant"),
        (["assistant", "user"], "the roles are assistant, user"),
        (["system"], "the roles are system"),
        (["user", "assistant", "user"], "the roles are user, assistant, user"),
        (["user", "system", "assistant"], "the roles are user, system, assistant"),
        ([], "there is no message"),
    ],
)
def test_a_wrong_sequence_is_shown_by_its_roles_and_never_by_its_words(
    inbox: Inbox, roles: Sequence[str], shown: str
) -> None:
    right = [{"role": "user", "content": "secret"}, {"role": "assistant", "content": "secret"}]
    wrong = [{"role": role, "content": "secret"} for role in roles]
    error = inbox.refused(jsonl({"messages": right}, {"messages": wrong}))
    assert error.report is not None
    assert finding(error.report, "role_sequence").examples == [f"line 2: {shown}"]
    assert "secret" not in error.message + error.report.model_dump_json()


def test_a_broken_csv_record_is_named_by_line_and_record(inbox: Inbox) -> None:
    error = inbox.refused('prompt,completion\n"One,\nor two?",Two.\nThree?,Four,five.\n', "a.csv")
    assert "a.csv, line 4 (record 2): 3 fields where the header has 2" in error.message


def test_an_open_quote_is_named_by_the_line_where_its_record_begins(inbox: Inbox) -> None:
    error = inbox.refused('prompt,completion\nOne?,Two.\n"Three?,Four.\nFive?,Six.\n', "a.csv")
    assert "line 3 (record 2): unexpected end of data (read from line 3 to line 4)" in error.message


def test_letters_of_another_encoding_are_named_with_the_conversion(inbox: Inbox) -> None:
    error = inbox.refused(jsonl(pair()).encode() + '{"prompt": "Größe?", "completion": "5"}\n'.encode("cp1252"))
    assert "line 2: byte 0xf6 is not UTF-8; it looks like WINDOWS-1252, which iconv -f WINDOWS-1252" in error.message
    for content, name in (("prompt,completion\nGröße?,5\n", "a.csv"), ("Größe\n", "a.txt"),
                          (json.dumps([pair("Größe?")], ensure_ascii=False), "a.json")):  # fmt: skip
        assert inbox.refused(content.encode("cp1252"), name).code == "not_utf8"


def test_a_broken_list_is_named_by_its_line(inbox: Inbox) -> None:
    error = inbox.refused('[\n {"prompt": "One?",\n  "completion": "Two."},\n {"prompt" "Three?"}\n]', "a.json")
    assert "line 4 (row 2): Expecting ':' delimiter at line 4" in error.message
    assert "the rest of the file was not read" in error.message


@pytest.mark.parametrize("content", ['[{"prompt": "1", "completion": "2"} {"prompt": "1", "completion": "2"}]',
                                     '[{"prompt": "1", "completion": "2"}] trailing', '[{"prompt": "1"'])  # fmt: skip
def test_a_list_is_read_strictly(inbox: Inbox, content: str) -> None:
    assert inbox.refused(content, "a.json").code == "broken_json"


def test_a_file_that_is_no_data_set_is_named_for_what_it_is(inbox: Inbox) -> None:
    assert "begins with 'hello there'" in inbox.refused("hello there\n").message
    assert "a zip archive" in inbox.refused(b"PK\x03\x04....", "a.xlsx").message
    assert "UTF-16LE" in inbox.refused("prompt,completion\n".encode("utf-16"), "a.csv").message
    assert "gzip inside gzip: unpack it once" in inbox.refused(gzip.compress(gzip.compress(b"{}")), "a.json").message
    assert "a Python pickle, which is never loaded" in inbox.refused(b"\x80\x04K\x01.", "a.json").message
    assert inbox.refused(b"\x00\x01\x02\x03" * 100).code == "unknown_format"


@pytest.mark.parametrize(
    ("column", "code", "words"),
    [
        (pa.array([2**62], pa.timestamp("us")), "wrong_type", "is a timestamp[us] that cannot be read"),
        (pa.array([2**62], pa.duration("s")), "wrong_type", "is a duration[s] that cannot be read"),
        (pa.array([2**30], pa.date32()), "wrong_type", "is a date32[day] that cannot be read"),
        (pa.array([b"\xff\xfe"]).view(pa.string()), "not_utf8", "byte 0xff is not UTF-8"),
        (pa.array([b"\xff"]), "wrong_type", "is a bytes here and text elsewhere"),
        (pa.array([[{"role": "user"}]]), "wrong_type", "is a list here"),
    ],
    ids=["timestamp", "duration", "date", "text", "bytes", "list"],
)
def test_a_column_of_an_odd_type_is_named_with_it(inbox: Inbox, column: pa.Array, code: str, words: str) -> None:
    table = pa.table({"prompt": column, "completion": ["Two."]})
    path = inbox.folder / "made"
    pq.write_table(table, path)
    parquet = inbox.refused(path.read_bytes(), "a.parquet")
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    for error in (parquet, inbox.refused(path.read_bytes(), "a.arrow")):
        assert error.code == code
        assert "row 1: " in error.message and words in error.message


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv"])
def test_of_two_columns_of_one_name_neither_is_guessed(inbox: Inbox, name: str) -> None:
    table = pa.table([["One?"], ["Two."], ["Three?"]], names=["prompt", "completion", "prompt"])
    path = inbox.folder / "made"
    if name == "a.csv":
        path.write_text("prompt,completion,prompt\nOne?,Two.,Three?\n")
    elif name == "a.parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    error = inbox.refused(path.read_bytes(), name)
    assert (error.code, "several columns called 'prompt'" in error.message) == ("duplicate_columns", True)


def test_many_equal_values_in_a_small_table_are_read_a_few_at_a_time(inbox: Inbox) -> None:
    answers = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["long " * 20_000]))
    path = inbox.folder / "made"
    pq.write_table(pa.table({"prompt": [str(n) for n in range(300)], "completion": answers}), path)
    assert path.stat().st_size < 100_000, "30 MB of text"
    most = 0
    for block in readers.table(path, path.name, columns=["prompt", "completion"]):
        most = max(most, sum(len(record["completion"]) for record in block.records))
    assert most < 2 * readers.BLOCK_BYTES
    assert inbox.take(path.read_bytes(), "a.parquet").rows == 300


def test_text_beside_the_content_that_is_no_text_is_named_by_its_line(inbox: Inbox) -> None:
    turns = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "tide"}}]},
        {"role": "tool", "content": "Noon.", "name": "\ud800", "tool_call_id": "1"},
        {"role": "assistant", "content": "At noon."},
    ]
    assert "line 1: half of a surrogate pair" in inbox.refused(jsonl({"messages": turns})).message


@pytest.mark.parametrize("depth", [100, 900])
def test_tools_that_nest_without_end_are_refused_and_not_stored(inbox: Inbox, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    call = f'{{"function": {{"name": "f", "arguments": {{"a": {deep}}}}}}}'
    asked = '{"role": "user", "content": "When?"}'
    calling = f'{{"messages": [{asked}, {{"role": "assistant", "content": "", "tool_calls": [{call}]}}]}}\n'
    tools = f'{{"messages": [{asked}, {{"role": "assistant", "content": "Now."}}], "tools": {deep}}}\n'
    for content in (calling, tools):
        assert (error := inbox.refused(content)).code == "tool_call", error.message
        assert "more than 64 levels" in error.message


def test_names_as_long_as_files_are_cut(inbox: Inbox) -> None:
    error = inbox.refused(jsonl({f"{n}" + "x" * 5000: 1 for n in range(2000)}))
    assert len(error.message) < 3000
    assert "and 1,988 more" in error.message


# ---- warnings --------------------------------------------------------------------------------------------------------


def test_duplicates_are_counted_with_the_line_that_they_repeat(inbox: Inbox) -> None:
    report = inbox.take(jsonl(pair(), pair("Three?"), *[pair()] * 5, pair("One?", "2.")))
    same = finding(report, "duplicate_rows")
    assert (same.count, same.level, same.examples[0]) == (5, "warning", "line 3: as line 1")
    assert finding(report, "duplicate_prompts").examples == ["line 8: as line 1"]
    assert report.rows == 8


def test_a_control_token_in_the_text_is_remarked(inbox: Inbox, tok: Tokenizer) -> None:
    report = inbox.take(jsonl(pair("What is <|im_end|>?")), tokenizer=tok)
    assert finding(report, "control_token").examples == ["line 1: '<|im_end|>'"]


def test_rows_longer_than_a_jobs_default_are_remarked(inbox: Inbox, tok: Tokenizer) -> None:
    report = inbox.take(jsonl(pair(), pair("Long?", "word " * 80)), tokenizer=tok, usual_tokens=64)
    remark = finding(report, "long_rows")
    assert remark.count == 1
    assert remark.examples[0].startswith("line 2: ")
    assert "64 are usual" in remark.examples[0]


def test_the_report_has_lengths_and_languages(inbox: Inbox, tok: Tokenizer) -> None:
    english = pair("What is the way to the harbour?", "It is the first street on the left.")
    german = pair("Wo ist der Hafen und wie komme ich hin?", "Es ist nicht weit, gehen Sie mit mir.")
    report = inbox.take(jsonl(english, german, german), tokenizer=tok)
    assert report.languages == {"de": 2, "en": 1}
    assert report.length_unit == "tokens"
    assert sum(bucket.rows for bucket in report.lengths) == 3
    assert report.longest_row_tokens is not None
    assert report.lengths[-1].up_to / 2 < report.longest_row_tokens <= report.lengths[-1].up_to
    assert inbox.take(jsonl(english)).length_unit == "bytes"


def test_the_same_rows_have_the_same_content_hash_in_every_format_and_no_other_rows_have(inbox: Inbox) -> None:
    records = [pair(f"Number {n}?", f"{n} " + "x" * (n % 900)) for n in range(9000)]
    table = "prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in records)
    uploads = [(jsonl(*records), "a.jsonl"), (json.dumps(records, indent=1), "a.json"), (table, "a.csv")]
    hashes = [inbox.take(content, name).content_sha256 for content, name in uploads]
    assert len(set(hashes)) == 1
    records[8999] = pair("Number 8999?", "another")
    assert inbox.take(jsonl(*records)).content_sha256 not in hashes
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    weighed = [turns[0], {**turns[1], "weight": 0}]
    told = {inbox.take(jsonl({"messages": m, **more})).content_sha256
            for m, more in ((turns, {}), (weighed, {}), (turns, {"tools": [{"name": "tide"}]}))}  # fmt: skip
    assert len(told) == 3


# ---- what is stored --------------------------------------------------------------------------------------------------


def test_rows_keep_their_line_and_their_token_counts(inbox: Inbox, tok: Tokenizer) -> None:
    report = inbox.take("\n" + jsonl(pair()) + "\n" + jsonl(pair("Three?", "Four and more.")), tokenizer=tok)
    table = pq.read_table(inbox.stored)
    encoded = [chat.encode(tok, row) for row in table.column("messages").to_pylist()]
    assert table.column("line").to_pylist() == [2, 4]
    assert table.column("tokens").to_pylist() == [len(row.ids) for row in encoded]
    assert table.column("answer_tokens").to_pylist() == [int(row.trained.sum()) for row in encoded]
    assert report.tokens == sum(len(row.ids) for row in encoded)
    assert report.answer_tokens == sum(int(row.trained.sum()) for row in encoded)
    assert report.longest_row_tokens == max(len(row.ids) for row in encoded)
    assert report.mean_row_tokens == report.tokens / 2


def test_without_a_tokenizer_nothing_is_counted(inbox: Inbox) -> None:
    report = inbox.take(jsonl(pair()))
    assert (report.tokens, report.longest_row_tokens) == (None, None)
    assert pq.read_table(inbox.stored).column("tokens").null_count == 1


def test_a_row_that_the_template_refuses_is_named(inbox: Inbox, tmp_path: Path) -> None:
    strict = tokenizer.load(models.write(tmp_path / "strict", models.MODEL_TURNS))
    good = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    error = inbox.refused(
        jsonl({"messages": good}, {"messages": [{"role": "system", "content": "Be brief."}, *good]}), tokenizer=strict
    )
    assert (error.code, error.report.rows if error.report else None) == ("chat_template", 1)
    assert "line 2: The model's chat template refuses the roles system, user, assistant" in error.message


def test_tools_are_kept_as_openai_writes_them_and_the_template_that_lacks_them_refuses_the_row(
    inbox: Inbox, tok: Tokenizer
) -> None:
    odd = (SAMPLES / "odd" / "tools_sharegpt.jsonl").read_text()
    inbox.take(odd)
    (row,) = rows.read(inbox.stored, 0, 10)
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    arguments = {"name": "tide", "arguments": {"harbour": "Porto"}}
    assert row.messages[1].tool_calls == [{"type": "function", "function": arguments}]
    assert row.tools is not None
    assert row.tools[0]["function"]["name"] == "tide"
    inbox.stored.unlink()
    error = inbox.refused(odd + jsonl(json.loads(odd)), tokenizer=tok)
    assert (error.code, error.report.rows_read if error.report else None) == ("tools", 2)
    assert "line 1: The chat template of model" in error.message


def test_a_normalised_file_can_be_uploaded_again(inbox: Inbox) -> None:
    first = inbox.take((SAMPLES / "odd" / "tools_openai.jsonl").read_text())
    again = inbox.take(inbox.stored.read_bytes(), "again.parquet")
    assert (again.format, again.content_sha256) == ("OpenAI chat (Parquet)", first.content_sha256)


def test_a_model_without_template_is_told_once_and_not_per_row(inbox: Inbox, tmp_path: Path) -> None:
    base = tokenizer.load(models.write(tmp_path / "base", None))
    assert inbox.refused(jsonl(pair(), pair()), tokenizer=base).code == "no_chat_template"


def test_what_is_wrong_with_the_model_is_told_as_such_beside_a_row_that_is_refused(
    inbox: Inbox, tmp_path: Path
) -> None:
    endless = tokenizer.load(models.write(tmp_path / "endless", models.UNCLOSED, eos=None))
    tools = (SAMPLES / "odd" / "tools_openai.jsonl").read_text()
    said = {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}
    assert inbox.refused(tools + jsonl({"messages": said}), tokenizer=endless).code == "no_end_of_turn"


def test_an_earlier_file_at_the_destination_survives_a_refusal(inbox: Inbox) -> None:
    inbox.take(jsonl(pair()))
    before = inbox.stored.read_bytes()
    with pytest.raises(Invalid):
        inbox.take(jsonl({"prompt": "Three?"}, pair()))
    assert inbox.stored.read_bytes() == before
    assert len(list(inbox.stored.parent.iterdir())) == 1


def test_progress_can_cancel_and_leaves_nothing(inbox: Inbox) -> None:
    seen: list[tuple[int, int]] = []

    def progress(read: int, size: int) -> None:
        seen.append((read, size))
        if len(seen) == 2:
            raise KeyboardInterrupt

    content = jsonl(*[pair(f"Number {n}?", "x" * 1000) for n in range(6000)])
    with pytest.raises(KeyboardInterrupt):
        inbox.take(content, progress=progress)
    assert 0 < seen[0][0] < seen[1][0] <= seen[1][1] == len(content)
    assert list(inbox.stored.parent.iterdir()) == []


def test_rows_of_many_blocks_keep_order_lines_and_numbers(inbox: Inbox) -> None:
    records = [pair(f"Number {n}?", f"{n} " + "x" * random.Random(n).randrange(2000)) for n in range(9000)]
    records[7000] = pair("no answer", None)
    error = inbox.refused(jsonl(*records))
    assert error.report is not None
    assert finding(error.report, "missing_field").examples == ["line 7001: field 'completion' is null"]
    records[7000] = pair("an answer", "yes")
    for content, name in ((jsonl(*records), "a.jsonl"), (json.dumps(records, indent=1), "a.json")):
        inbox.take(content, name)
        assert [row.messages[0].content for row in rows.read(inbox.stored, 6999, 2)] == ["Number 6999?", "an answer"]
        assert rows.line(inbox.stored, 7000) == {"a.jsonl": 7001, "a.json": 4 * 7000 + 2}[name]
        assert rows.count(inbox.stored) == 9000


def test_cancelling_does_not_wait_for_the_end_of_a_block(inbox: Inbox, tok: Tokenizer) -> None:
    looks = 0

    def progress(read: int, size: int) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    content = jsonl(*[pair(f"Number {n}?", "on and on") for n in range(5 * dataset.TOKENIZE_ROWS)])
    assert len(content) < 2 << 20, "one block"
    with pytest.raises(KeyboardInterrupt):
        inbox.take(content, tokenizer=tok, progress=progress)
    assert list(inbox.stored.parent.iterdir()) == []


# ---- many at once and one by one -------------------------------------------------------------------------------------

texts = st.one_of(
    st.text(max_size=6), st.integers(), st.none(), st.booleans(), st.lists(st.text(max_size=2), max_size=2)
)
turns = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": texts,
            "from": st.sampled_from(["human", "gpt"]), "value": st.text(max_size=3), "tool_calls": st.just([1]),
        },
    ),
    max_size=4,
)  # fmt: skip
good_turns = st.integers(0, 2).flatmap(
    lambda n: st.tuples(*[st.text(max_size=4)] * (2 * n + 2)).map(
        lambda said: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    )
)
records = st.one_of(
    st.lists(st.fixed_dictionaries({"prompt": st.text(max_size=4), "completion": st.text(max_size=4)},
                                   optional={"system": texts}), min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"prompt": texts}, optional={"completion": texts}), min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"instruction": st.text(max_size=4), "output": st.text(max_size=4)},
                                   optional={"input": texts}), min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"messages": st.one_of(turns, good_turns, texts)}, optional={"system": texts}),
             min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"text": texts}), min_size=1, max_size=4),
)  # fmt: skip


@example([{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], "system": 0}])
@example([{"instruction": "", "output": "", "input": 0}])
@given(records)
@settings(max_examples=400, deadline=None)
def test_converting_at_once_gives_what_converting_one_by_one_gives(found: list[dict[str, Any]]) -> None:
    shape = shapes.detect(sorted({name for record in found for name in record}), found)
    if shape is None:
        return
    single = [shape.convert(record) for record in found]
    at_once = shape.convert_all(found)
    if at_once is not None:
        good = [row for row in single if isinstance(row, shapes.Row)]
        assert at_once == shapes.flat(good)
        assert len(good) == len(found)
        assert not any(row.numbers for row in good)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode),
                 st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                              lambda inner: st.lists(inner, max_size=3)
                              | st.dictionaries(st.sampled_from(["prompt", "completion", "messages", "role", "content",
                                                                 "text", "x"]), inner, max_size=3),
                              max_leaves=12).map(lambda value: json.dumps(value).encode() + b"\n")),
       st.sampled_from(["a.jsonl", "a.csv", "a.txt", "a.parquet"]))  # fmt: skip
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_taken_or_refused_in_words(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / "upload"
    path.write_bytes(content)
    try:
        report = dataset.ingest(path, tmp_path / "out", filename=name, tokenizer=None)
    except InvalidDataset as error:
        assert error.message and error.code
    else:
        assert report.rows == report.rows_read > 0
