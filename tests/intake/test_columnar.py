"""Arrow's reading of JSON lines gives what reading them row by row gives, or nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.intake import columnar, columns, readers, shapes
from core.intake.readers import Block
from core.intake.shapes import Row

words = st.one_of(
    st.text(max_size=5), st.sampled_from(["", " ", "2024-01-01", "true", "1", "null", "\x00", "é", "\u2028"])
)
odd = st.one_of(words, st.integers(), st.none(), st.booleans(), st.just(1e400), st.lists(words, max_size=1))
role = st.sampled_from(["user", "assistant", "system", "human", "tool", "x"])
turns = st.lists(
    st.fixed_dictionaries({"role": role, "content": odd}, optional={"weight": st.just(0), "name": words}), max_size=4
)
good = st.integers(1, 2).flatmap(
    lambda n: st.lists(words, min_size=2 * n, max_size=2 * n).map(
        lambda said: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    )
)
system = st.builds(lambda text, chat: [{"role": "system", "content": text}, *chat], words, good)
records = st.one_of(
    st.lists(st.fixed_dictionaries({"messages": good | system}, optional={"note": odd}), min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"messages": good | turns}, optional={"system": words}), min_size=1, max_size=3),
    st.lists(st.fixed_dictionaries({"prompt": words, "completion": words}), min_size=1, max_size=4),
    st.lists(
        st.fixed_dictionaries({"instruction": words, "output": words}, optional={"input": words | st.none(), "x": odd}),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.fixed_dictionaries({"text": odd}), min_size=1, max_size=4),
)


@example([{"prompt": "2024-01-01", "completion": "2024-01-02T03:04:05Z"}] * 2)
@example([{"instruction": "", "output": "a", "input": "b"}, {"instruction": "c", "output": "d", "input": None}])
@given(records)
@settings(max_examples=150, deadline=None)
def test_a_block_is_read_as_its_rows_are_one_by_one(found: list[dict[str, Any]]) -> None:
    shape = shapes.detect(sorted({name for record in found for name in record}), found)
    if shape is None:
        return
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found).encode("utf-8", "surrogatepass")
    at_once = columnar.read(text, len(found), shape)
    if at_once is None:
        return
    single = [shape.convert(record) for record in readers.parsed(Block(range(len(found)), (), 0, text)).records]
    good_rows = [row for row in single if isinstance(row, Row)]
    assert len(good_rows) == len(single)
    assert not any(row.numbers for row in good_rows)
    wanted = columns.of_chats(shapes.flat(good_rows))
    assert wanted is not None
    assert at_once.chats() == wanted.chats()
    for one, other in zip(at_once.hashes(), wanted.hashes(), strict=True):
        assert one.tolist() == other.tolist()
    assert at_once.bytes().tolist() == wanted.bytes().tolist()
    assert at_once.blank().tolist() == wanted.blank().tolist()


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
        {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]},
        {"prompt": "1", "completion": "2"},
        {"instruction": "1", "input": "", "output": "2", "id": 7},
        {"text": "1"},
    ],
)
def test_every_usual_shape_is_read_at_once(record: dict[str, Any]) -> None:
    shape = shapes.detect(list(record), [record])
    assert shape is not None
    assert columnar.read((json.dumps(record) + "\n").encode() * 3, 3, shape) is not None


def test_a_field_of_another_name_in_every_row_takes_no_memory() -> None:
    records = [{"prompt": "1", "completion": "2", f"key_{n}": "x"} for n in range(2000)]
    shape = shapes.detect(["prompt", "completion"], records)
    assert shape is not None
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    pool = pa.proxy_memory_pool(earlier := pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        assert columnar.read(text, 2000, shape) is not None
    finally:
        pa.set_memory_pool(earlier)
    assert 0 < (pool.max_memory() or 0) < 4 << 20, "a column of each would take 16 MiB"


@pytest.mark.parametrize("beside", [{"tool_calls": []}, {"tool_calls": "x"}, {"function_call": {}}, {"weight": 0}])
def test_a_message_that_says_more_than_words_is_left_to_it_too(beside: dict[str, Any]) -> None:
    def read(**more: Any) -> object:
        record = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", **more}]}
        return columnar.read((json.dumps(record) + "\n").encode(), 1, shape)

    plain = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    shape = shapes.detect(["messages"], [plain])
    assert shape is not None
    assert read(**beside) is None
    assert read(name="x", anything={"at": "all"}) is not None
    assert read(weight=None) is not None


@pytest.mark.parametrize("line", [b"", b'{"prompt": "1"}', b'{"prompt": "1", "completion": "\xff"}', b"[1]", b"{}{}"])
def test_what_is_not_plain_is_left_to_the_reading_row_by_row(line: bytes) -> None:
    record = {"prompt": "1", "completion": "2"}
    shape = shapes.detect(list(record), [record])
    assert shape is not None
    plain = json.dumps(record).encode()
    assert columnar.read(b"\n".join([plain, line, plain, b""]), 3, shape) is None


def test_two_rows_on_one_line_do_not_stand_for_a_blank_one() -> None:
    record = {"prompt": "1", "completion": "2"}
    shape = shapes.detect(list(record), [record])
    assert shape is not None
    plain = json.dumps(record).encode()
    assert columnar.read(b"\n".join([plain, b"", plain + plain, b""]), 3, shape) is None
    assert columnar.read(b"\n".join([plain, b"  ", plain + plain, b""]), 3, shape) is None


def test_hashes_tell_order_and_what_is_beside_the_words() -> None:
    def of(contents: list[str], calls: str | None = None) -> int:
        extras = tuple(shapes.Extra(calls if at == 1 else None) for at in range(len(contents))) if calls else None
        found = columns.of_chats(shapes.flat([Row(("user", "assistant"), tuple(contents), False, extras)]))
        assert found is not None
        return int(found.hashes()[0][0])

    assert len({of(["a", "b"]), of(["b", "a"]), of(["ab", ""]), of(["a", "b"], "[1]"), of(["a", "b"], "[2]")}) == 5


def test_the_hash_of_a_prompt_leaves_out_the_last_message() -> None:
    rows = [Row(("user", "assistant"), ("same", answer)) for answer in ("one", "two")]
    found = columns.of_chats(shapes.flat([*rows, Row(("text",), ("same",))]))
    assert found is not None
    whole, prompts = found.hashes()
    assert whole[0] != whole[1]
    assert prompts[0] == prompts[1]
    assert np.array_equal(whole[2:], prompts[2:])
