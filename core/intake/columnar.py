"""JSON lines → columns, by Arrow's parser: no Python object a row, for blocks in which every row is as it should be.

A block with anything else gives None, and is then read row by row, which says what is wrong, or that it is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from core.intake.chat import TEXT_ROLE
from core.intake.columns import Columns
from core.intake.shapes import MESSAGE_ROLES, Shape

_KEYS = {"OpenAI chat": ("role", "content"), "ShareGPT": ("from", "value")}
# Fields of a message that say more than its role and words: where one is given, the row is not plain.
_BESIDE = {
    "OpenAI chat": ("tool_calls", "function_call", "weight"),
    "ShareGPT": ("tool_calls", "function_call", "weight", "role", "content"),
}
_OTHERS = {"alpaca", "prompt/completion", "text"}
_CODES = {"system": 0, "user": 1, "assistant": 2}


def read(text: bytes, lines: int, shape: Shape) -> Columns | None:
    """The rows of so many whole lines of a known shape; None where a row is not plain."""
    if not shape.columns or shape.name not in _OTHERS | _KEYS.keys():
        return None
    # To Arrow lines are nothing: a blank one beside one with two rows would come out as two rows.
    if not text.startswith(b"{") or text.count(b"\n{") != lines - 1:
        return None
    if not text.isascii() and not _is_utf8(text):
        return None
    table = _parsed(text, _schema(shape))
    if table is None or table.num_rows != lines:
        return None
    if shape.name in _KEYS:
        return _chats(table, shape)
    return _pairs(table, shape)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _schema(shape: Shape) -> pa.Schema:
    fields = {column: pa.string() for column in shape.columns.values()}
    if shape.name in _KEYS:
        said, words = _KEYS[shape.name]
        turn = [(said, pa.string()), (words, pa.string()), *((name, pa.null()) for name in _BESIDE[shape.name])]
        fields[shape.columns["messages"]] = pa.list_(pa.struct(turn))
    return pa.schema(fields)


def _parsed(text: bytes, schema: pa.Schema) -> pa.Table | None:
    """None where a value is of another type. Fields that the schema does not name are not even looked at: a column of
    each would take memory for all rows."""
    try:
        return pj.read_json(
            pa.BufferReader(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return None


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _chats(table: pa.Table, shape: Shape) -> Columns | None:
    for role, beside in shape.columns.items():
        if role != "messages" and not _is_empty(_column(table, beside)):
            return None
    chats = _column(table, shape.columns["messages"])
    turns = chats.values
    if chats.null_count or turns.null_count or not len(turns):
        return None
    said, contents = (turns.field(key) for key in _KEYS[shape.name])
    if said.null_count or contents.null_count:
        return None
    offsets = chats.offsets.to_numpy()
    offsets = (offsets - offsets[0]).astype(np.int32)
    found = said.dictionary_encode()
    names = [MESSAGE_ROLES.get(name) for name in found.dictionary.to_pylist()]
    if None in names:
        return None
    codes = np.array([_CODES[str(name)] for name in names], dtype=np.int8)[found.indices.to_numpy()]
    if not _in_turn(codes, offsets):
        return None
    roles = said if names == found.dictionary.to_pylist() else pa.array(names, pa.string()).take(found.indices)
    return Columns(offsets, roles, contents)


def _in_turn(codes: npt.NDArray[np.int8], offsets: npt.NDArray[np.int32]) -> bool:
    """Whether in every row, after at most one system message, user and assistant take turns to the end."""
    sizes = np.diff(offsets)
    if not sizes.all():
        return False
    has_system = (codes[offsets[:-1]] == _CODES["system"]).astype(np.int32)
    turns = sizes - has_system
    if (turns % 2).any() or not turns.all():
        return False
    places = np.arange(len(codes)) - np.repeat(offsets[:-1] + has_system, sizes)
    wanted = np.where(places < 0, _CODES["system"], np.where(places % 2, _CODES["assistant"], _CODES["user"]))
    return bool((codes == wanted).all())


def _is_empty(texts: pa.Array) -> bool:
    return not pc.any(pc.not_equal(pc.binary_length(texts), 0)).as_py()


def _pairs(table: pa.Table, shape: Shape) -> Columns | None:
    given = {role: _column(table, column) for role, column in shape.columns.items()}
    needed = {"alpaca": ("instruction", "output"), "prompt/completion": ("prompt", "completion"), "text": ("text",)}
    if any(given[role].null_count for role in needed[shape.name]):
        return None
    count = table.num_rows
    if shape.name == "text":
        return Columns(np.arange(count + 1, dtype=np.int32), _repeated(TEXT_ROLE, count), given["text"])
    prompts, answers = (given[role] for role in needed[shape.name])
    if "input" in given and not _is_empty(contexts := given["input"].fill_null("")):
        joined = pc.binary_join_element_wise(prompts, contexts, "\n\n")
        prompts = pc.if_else(pc.equal(contexts, ""), prompts, pc.if_else(pc.equal(prompts, ""), contexts, joined))
    if "system" in given and not _is_empty(given["system"]):
        return None
    both = pa.concat_arrays([prompts, answers])
    order = np.arange(2 * count, dtype=np.int64).reshape(2, count).T.ravel()
    roles = pa.array(["user", "assistant"]).take(pa.array(np.tile([0, 1], count)))
    return Columns(np.arange(0, 2 * count + 1, 2, dtype=np.int32), roles, both.take(pa.array(order)))


def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(text, count)
