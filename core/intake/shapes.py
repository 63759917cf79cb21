"""Records → messages. A shape says which columns of a file play which role, and how a record becomes a chat.

alpaca: instruction, input, output (and system). prompt/completion: one question, one answer (and system). OpenAI chat:
a list of {role, content}, with calls and results of tools. ShareGPT: a list of {from, value}. text: plain text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from core.errors import Invalid
from core.intake.chat import TEXT_ROLE
from core.intake.findings import Fault

COLUMN_ROLES = ("messages", "instruction", "input", "output", "prompt", "completion", "system", "text", "tools")
# A role's usual column names, likeliest first; compared without regard to case.
_ALIASES = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat"),
    "instruction": ("instruction",),
    "input": ("input", "context"),
    "output": ("output", "response", "answer", "completion"),
    "prompt": ("prompt", "question", "query", "input", "instruction", "user"),
    "completion": ("completion", "response", "answer", "output", "target", "assistant"),
    "system": ("system", "system_prompt"),
    "text": ("text",),
    "tools": ("tools", "functions"),
}
_SHAPES = (
    ("messages", ("messages",), ("system", "tools")),
    ("alpaca", ("instruction", "output"), ("input", "system")),
    ("prompt/completion", ("prompt", "completion"), ("system",)),
    ("text", ("text",), ()),
)
MESSAGE_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
}
# What calls and lists of tools may nest; whoever reads them back stops somewhere beyond a hundred.
_MAX_DEPTH = 64
# Whose words are calls of tools, as JSON, and whose are what a tool answered.
_CALL_ROLES = {"function_call", "tool_call"}
_RESULT_ROLES = {"tool", "function", "function_response", "tool_response", "observation"}
_SPECIAL_FIELDS = {"tool_calls", "function_call", "weight"}
_CALLS = "assistant (calls a tool)"
_FOLLOWS: dict[str, set[str]] = {
    "user": {"assistant", _CALLS},
    "assistant": {"user"},
    _CALLS: {"tool"},
    "tool": {"tool", "assistant", _CALLS},
}
_SHOWN_NAME = 60
_KINDS = {
    str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip


class Extra(NamedTuple):
    """What a message has beside role and content: calls of tools (the OpenAI list as JSON), the name of the tool that
    answers, the id of the call that it answers, a weight of 0 or 1 in the loss."""

    tool_calls: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    weight: int | None = None


class Row(NamedTuple):
    """A chat: roles and contents, one of each per message. `numbers`: some content was a number in the file. `extras`:
    one per message, None when none has any. `tools`: those that the chat offers, as JSON."""

    roles: tuple[str, ...]
    contents: tuple[str, ...]
    numbers: bool = False
    extras: tuple[Extra, ...] | None = None
    tools: str | None = None


class Chats(NamedTuple):
    """Rows laid out flat: the roles and contents of all messages, and how many of them each row has. `extras` (one per
    message) and `tools` (one per row) are None when no row has any."""

    roles: list[str]
    contents: list[str]
    sizes: list[int]
    extras: list[Extra] | None = None
    tools: list[str | None] | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """`columns`: role → column of the file; `convert` makes a row of a record, or says what is wrong with it;
    `convert_all` does the same for many records at once where they are as they should be (None where one is not), an
    order of magnitude faster."""

    name: str
    columns: dict[str, str]
    convert: Callable[[Any], Row | Fault]
    convert_all: Callable[[Sequence[Any]], Chats | None]


def flat(rows: Sequence[Row]) -> Chats:
    """Rows in the layout of `Chats`."""
    extras = None
    if any(row.extras is not None for row in rows):
        extras = [extra for row in rows for extra in row.extras or (Extra(),) * len(row.roles)]
    return Chats(
        [role for row in rows for role in row.roles],
        [content for row in rows for content in row.contents],
        [len(row.roles) for row in rows],
        extras,
        [row.tools for row in rows] if any(row.tools is not None for row in rows) else None,
    )


def rows(chats: Chats) -> list[Row]:
    """The other way round."""
    found = []
    begin = 0
    for at, size in enumerate(chats.sizes):
        end = begin + size
        extras = tuple(chats.extras[begin:end]) if chats.extras is not None else None
        tools = chats.tools[at] if chats.tools is not None else None
        found.append(Row(tuple(chats.roles[begin:end]), tuple(chats.contents[begin:end]), False, extras, tools))
        begin = end
    return found


def known_names(names: Sequence[str], columns: Mapping[str, str] | None = None) -> int:
    """How many of the names are columns that intake knows, or that the mapping names."""
    known = {alias for aliases in _ALIASES.values() for alias in aliases}
    mapped = set((columns or {}).values())
    return sum(name.strip().lower() in known or name in mapped for name in names)


def check_mapping(columns: Mapping[str, str]) -> None:
    """Raise Invalid when a mapping names a role that does not exist."""
    for role in columns:
        if role not in COLUMN_ROLES:
            raise Invalid(
                "unknown_column_role",
                f"The mapping gives column {shown([columns[role]])} the role {shown([role])}. Roles are "
                f"{', '.join(COLUMN_ROLES)}.",
                "columns",
            )


def detect(names: Sequence[str], samples: Sequence[Any], columns: Mapping[str, str] | None = None) -> Shape | None:
    """The shape of a file with columns `names`, of which `samples` are records; None when no shape fits.

    `columns` (role → column) goes before the usual names. Raises Invalid when it names a column that is not there.
    """
    mapping = dict(columns or {})
    if samples and isinstance(samples[0], str):
        return Shape("text", {}, _bare_text, _not_at_once)
    if samples and isinstance(samples[0], list):
        return Shape(_messages_kind(samples[0]), {}, _bare_messages, _not_at_once)
    for role, column in mapping.items():
        if column not in names:
            raise Invalid(
                "unknown_column",
                f"The mapping names column {shown([column])} for {role}; the file has {shown(names)}.",
                "columns",
            )
    for name, needed, optional in _SHAPES:
        found = _assign(names, needed, mapping)
        # A mapping that has a role of another shape is meant for that shape.
        if len(found) < len(needed) or not set(mapping) <= {*needed, *optional}:
            continue
        found |= _assign([column for column in names if column not in found.values()], optional, mapping)
        twice = [column for column in found.values() if list(names).count(column) > 1]
        if twice:
            raise Invalid(
                "duplicate_columns",
                f"There are several columns called {shown(twice[:1])}, and only one can be read. Rename or remove the "
                "others.",
                "columns",
            )
        if name == "messages":
            chats = (sample.get(found["messages"]) for sample in samples if isinstance(sample, dict))
            kind_of_chat = _messages_kind(next((chat for chat in chats if chat), None))
            return Shape(kind_of_chat, found, _messages(found), partial(_all_chats, found))
        return Shape(name, found, _CONVERTERS[name](found), partial(_AT_ONCE[name], found))
    return None


def _assign(names: Sequence[str], roles: Sequence[str], mapping: Mapping[str, str]) -> dict[str, str]:
    by_lower = {name.strip().lower(): name for name in reversed(names)}
    found: dict[str, str] = {}
    for role in roles:
        column = mapping.get(role) or next(
            (
                by_lower[alias]
                for alias in _ALIASES[role]
                if alias in by_lower and by_lower[alias] not in found.values()
            ),
            None,
        )
        if column is not None:
            found[role] = column
    return found


def shown(names: Sequence[str], most: int = 12) -> str:
    """The first names of columns, for people: each in quotes and cut where it is long."""
    cut = [repr(name if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]}…") for name in names[:most]]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(cut)}{more}" if cut else "nothing"


def kind(value: Any) -> str:
    """What a value is, for people."""
    if type(value) is float and math.isnan(value):
        return "NaN"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


# ---- fields ----------------------------------------------------------------------------------------------------------


def _field(record: Any, column: str) -> str | Fault:
    """A field that must be there and be text; a number is taken as it is written."""
    if not isinstance(record, dict):
        return Fault("not_an_object", f"{kind(record)} stands where an object is expected")
    value = record.get(column)
    if type(value) is str:
        return value
    if _is_absent(value):
        return _missing(record, column)
    if type(value) in (int, float):
        return _Number(repr(value))
    return Fault("wrong_type", f"field {column!r} is {kind(value)} here and text elsewhere")


def _missing(record: Mapping[str, Any], column: str) -> Fault:
    if column in record:
        return Fault("missing_field", f"field {column!r} is {kind(record[column])}")
    return Fault("missing_field", f"no field {column!r}; there is {shown(list(record), 8)}")


def _is_absent(value: Any) -> bool:
    """Null, or NaN, as pandas writes a value that is not there."""
    return value is None or (type(value) is float and math.isnan(value))


class _Number(str):
    """Text that was a number in the file, or has one in it."""

    __slots__ = ()


def _optional(record: Any, column: str | None) -> str | Fault:
    if column is None or (isinstance(record, dict) and _is_absent(record.get(column))):
        return ""
    return _field(record, column)


def _row(roles: tuple[str, ...], *contents: str) -> Row:
    numbers = any(type(content) is _Number for content in contents)
    return Row(roles, tuple(map(str, contents)) if numbers else contents, numbers)


# ---- converters ------------------------------------------------------------------------------------------------------


def _prompt_completion(columns: Mapping[str, str]) -> Callable[[Any], Row | Fault]:
    prompt_column, answer_column, system_column = columns["prompt"], columns["completion"], columns.get("system")

    def convert(record: Any) -> Row | Fault:
        prompt, answer = _field(record, prompt_column), _field(record, answer_column)
        if isinstance(prompt, Fault):
            return prompt
        if isinstance(answer, Fault):
            return answer
        return _with_system(record, system_column, prompt, answer)

    return convert


def _alpaca(columns: Mapping[str, str]) -> Callable[[Any], Row | Fault]:
    instruction_column, answer_column = columns["instruction"], columns["output"]
    input_column, system_column = columns.get("input"), columns.get("system")

    def convert(record: Any) -> Row | Fault:
        instruction, answer = _field(record, instruction_column), _field(record, answer_column)
        context = _optional(record, input_column)
        if isinstance(instruction, Fault):
            return instruction
        if isinstance(answer, Fault):
            return answer
        if isinstance(context, Fault):
            return context
        return _with_system(record, system_column, _prompt(instruction, context), answer)

    return convert


def _prompt(instruction: str, context: str) -> str:
    prompt = f"{instruction}\n\n{context}" if instruction and context else instruction or context
    return _Number(prompt) if _Number in (type(instruction), type(context)) else prompt


def _with_system(record: Any, column: str | None, prompt: str, answer: str) -> Row | Fault:
    system = _optional(record, column)
    if isinstance(system, Fault):
        return system
    if system:
        return _row(("system", "user", "assistant"), system, prompt, answer)
    return _row(("user", "assistant"), prompt, answer)


def _plain_text(columns: Mapping[str, str]) -> Callable[[Any], Row | Fault]:
    column = columns["text"]

    def convert(record: Any) -> Row | Fault:
        text = _field(record, column)
        return text if isinstance(text, Fault) else _row((TEXT_ROLE,), text)

    return convert


def _bare_text(record: Any) -> Row | Fault:
    if not isinstance(record, str):
        return Fault("wrong_type", f"{kind(record)} here and text elsewhere")
    return Row((TEXT_ROLE,), (record,))


def _not_at_once(records: Sequence[Any]) -> None:
    return None


def _texts(records: Sequence[Any], column: str) -> list[str] | None:
    """A field of all records; None unless it is there and text in each."""
    try:
        values = [record[column] for record in records]
    except (KeyError, TypeError):
        return None
    return values if set(map(type, values)) <= {str} else None


def _optional_texts(records: Sequence[Any], column: str | None) -> list[str] | None:
    """As `_texts`, empty where the field is null or missing."""
    if column is None:
        return [""] * len(records)
    try:
        values = [record.get(column) for record in records]
    except AttributeError:
        return None
    kinds = set(map(type, values))
    if kinds <= {str}:
        return values
    return [value or "" for value in values] if kinds <= {str, type(None)} else None


def _all_prompt_completion(columns: Mapping[str, str], records: Sequence[Any]) -> Chats | None:
    prompts, answers = _texts(records, columns["prompt"]), _texts(records, columns["completion"])
    systems = _optional_texts(records, columns.get("system"))
    return None if prompts is None or answers is None or systems is None else _paired(systems, prompts, answers)


def _all_alpaca(columns: Mapping[str, str], records: Sequence[Any]) -> Chats | None:
    instructions, answers = _texts(records, columns["instruction"]), _texts(records, columns["output"])
    contexts = _optional_texts(records, columns.get("input"))
    systems = _optional_texts(records, columns.get("system"))
    if instructions is None or answers is None or contexts is None or systems is None:
        return None
    return _paired(systems, list(map(_prompt, instructions, contexts)) if any(contexts) else instructions, answers)


def _paired(systems: list[str], prompts: list[str], answers: list[str]) -> Chats:
    count = len(prompts)
    if not any(systems):
        return Chats(
            ["user", "assistant"] * count, list(chain.from_iterable(zip(prompts, answers, strict=True))), [2] * count
        )
    return flat(
        [
            Row(("system", "user", "assistant"), row) if row[0] else Row(("user", "assistant"), row[1:])
            for row in zip(systems, prompts, answers, strict=True)
        ]
    )


def _all_text(columns: Mapping[str, str], records: Sequence[Any]) -> Chats | None:
    texts = _texts(records, columns["text"])
    return None if texts is None else Chats([TEXT_ROLE] * len(texts), texts, [1] * len(texts))


_CONVERTERS = {"alpaca": _alpaca, "prompt/completion": _prompt_completion, "text": _plain_text}
_AT_ONCE = {"alpaca": _all_alpaca, "prompt/completion": _all_prompt_completion, "text": _all_text}


# ---- chats -----------------------------------------------------------------------------------------------------------


def _messages_kind(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else None
    return "ShareGPT" if isinstance(first, dict) and "from" in first else "OpenAI chat"


def _bare_messages(record: Any) -> Row | Fault:
    return _chat(record, "the row")


def _messages(columns: Mapping[str, str]) -> Callable[[Any], Row | Fault]:
    column, system_column, tools_column = columns["messages"], columns.get("system"), columns.get("tools")

    def convert(record: Any) -> Row | Fault:
        if not isinstance(record, dict):
            return Fault("not_an_object", f"{kind(record)} stands where an object is expected")
        value = record.get(column)
        if _is_absent(value):
            return _missing(record, column)
        if isinstance(value, str):
            value = _nested(value)
        row = _with_system_first(_chat(value, f"field {column!r}"), _optional(record, system_column))
        if isinstance(row, Fault) or tools_column is None:
            return row
        if _is_absent(record.get(tools_column)) or record[tools_column] in ("", []):
            return row
        tools = _tools(record[tools_column], tools_column)
        return tools if isinstance(tools, Fault) else row._replace(tools=tools)

    return convert


def _tools(value: Any, column: str) -> str | Fault:
    """A list of tools in the OpenAI form as JSON; bare functions (and JSON text, as ShareGPT has it) are wrapped."""
    listed = _nested(value) if isinstance(value, str) else value
    if not isinstance(listed, list):
        return Fault("tool_call", f"field {column!r} is {kind(listed)}, not a list of tools")
    if _is_deep(listed):
        return Fault("tool_call", f"field {column!r} has more than {_MAX_DEPTH} levels")
    tools = []
    for number, tool in enumerate(listed, 1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            return Fault("tool_call", f"tool {number} of field {column!r} has no function with a name")
        tools.append({"type": "function", "function": _without_nulls(function)})
    return json.dumps(tools, ensure_ascii=False, default=str) if tools else ""


def _is_deep(value: Any) -> bool:
    """Whether lists and objects lie in each other beyond the limit."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _without_nulls(value: Any) -> Any:
    """Tables give every row the fields of all rows, as nulls."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _with_system_first(row: Row | Fault, system: str | Fault) -> Row | Fault:
    """The chat with a system message that the record has beside it, unless the chat begins with one."""
    if isinstance(row, Fault) or not system or row.roles[:1] == ("system",):
        return row
    if isinstance(system, Fault):
        return system
    extras = (Extra(), *row.extras) if row.extras is not None else None
    return Row(("system", *row.roles), (system, *row.contents), row.numbers, extras)


def _all_chats(columns: Mapping[str, str], records: Sequence[Any]) -> Chats | None:
    beside = [column for role, column in columns.items() if role != "messages"]
    try:
        if any(record.get(column) not in (None, "") for column in beside for record in records):
            return None
        chats = [record[columns["messages"]] for record in records]
        turns = list(chain.from_iterable(chats))
        said, words, others = ("role", "content", {"from", "value"})
        if "role" not in turns[0]:
            said, words, others = ("from", "value", {"role", "content"})
        if set(map(len, turns)) != {2} and not all(map((others | _SPECIAL_FIELDS).isdisjoint, turns)):
            return None
        roles = [MESSAGE_ROLES[turn[said]] for turn in turns]
        contents = [turn[words] for turn in turns]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    sizes = list(map(len, chats))
    remaining = iter(roles)
    sequences = {tuple(islice(remaining, size)) for size in sizes}
    if set(map(type, contents)) != {str} or set(map(type, chats)) != {list} or any(map(_sequence_fault, sequences)):
        return None
    return Chats(roles, contents, sizes)


def _nested(text: str) -> Any:
    """A table without lists (CSV) holds a chat as JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _chat(turns: Any, where: str) -> Row | Fault:
    if not isinstance(turns, list):
        return Fault("wrong_type", f"{where} is {kind(turns)}, not a list of messages")
    said: list[_Message] = []
    for number, turn in enumerate(turns, 1):
        message = _message(turn, number)
        if isinstance(message, Fault):
            return message
        said.append(message)
    extras = tuple(message.extra for message in said)
    fault = _sequence_fault(tuple(_CALLS if one.extra.tool_calls else one.role for one in said)) or _unknown_call(
        extras
    )
    return fault or Row(
        tuple(message.role for message in said),
        tuple(message.content for message in said),
        any(message.is_number for message in said),
        extras if set(extras) != {Extra()} else None,
    )


class _Message(NamedTuple):
    role: str
    content: str
    extra: Extra
    is_number: bool


def _message(turn: Any, number: int) -> _Message | Fault:
    if not isinstance(turn, dict):
        return Fault("wrong_type", f"message {number} is {kind(turn)}, not an object")
    said = turn.get("role") if turn.get("role") is not None else turn.get("from")
    role = MESSAGE_ROLES.get(said) if isinstance(said, str) else None
    if role is None and not (isinstance(said, str) and said in _CALL_ROLES | _RESULT_ROLES):
        return _role_fault(said, number)
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    extra = _extra(str(said), content, turn, number)
    if isinstance(extra, Fault):
        return extra
    if said in _CALL_ROLES or (content is None and extra.tool_calls):
        content = ""
    text = content if type(content) is str else _content(content, turn, number)
    if isinstance(text, Fault):
        return text
    is_number = type(content) in (int, float)
    return _Message(role or ("assistant" if said in _CALL_ROLES else "tool"), text, extra, is_number)


def _role_fault(said: Any, number: int) -> Fault:
    if said is None:
        return Fault("missing_field", f"message {number} has no field 'role' (or 'from')")
    shown = repr(said[:24]) if isinstance(said, str) else kind(said)
    return Fault("unknown_role", f"message {number} has the role {shown}")


def _extra(said: str, content: Any, turn: Mapping[str, Any], number: int) -> Extra | Fault:
    """What the message has beside role and content."""
    calls = turn.get("tool_calls") or turn.get("function_call") or (content if said in _CALL_ROLES else None)
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        return Fault("wrong_type", f"the weight of message {number} is {weight!r:.24}, not 0 or 1")
    weight = 0 if weight == 0 and weight is not None else None
    if said in _RESULT_ROLES:
        name, call_id = turn.get("name"), turn.get("tool_call_id")
        return Extra(None, str(name) if name else None, str(call_id) if call_id else None)
    if not calls:
        return Extra(weight=weight) if said not in _CALL_ROLES else _no_call(number)
    if said not in _CALL_ROLES and MESSAGE_ROLES.get(said) != "assistant":
        return Fault("tool_call", f"message {number} of the role {said} calls a tool; only the assistant can")
    listed = _called(calls, number)
    return listed if isinstance(listed, Fault) else Extra(listed, weight=weight)


def _no_call(number: int) -> Fault:
    return Fault("tool_call", f"message {number} names no function that it calls")


def _called(calls: Any, number: int) -> str | Fault:
    """Calls of tools in the OpenAI form, with arguments as an object, as JSON."""
    calls = _nested(calls) if isinstance(calls, str) else calls
    if _is_deep(calls):
        return Fault("tool_call", f"message {number} calls a tool with more than {_MAX_DEPTH} levels of arguments")
    listed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            return _no_call(number)
        arguments = function.get("arguments", function.get("parameters"))
        arguments = (_nested(arguments) if arguments.strip() else {}) if isinstance(arguments, str) else arguments
        if arguments is None:
            arguments = {}
        if _is_deep(arguments):
            return Fault("tool_call", f"message {number} calls a tool with more than {_MAX_DEPTH} levels of arguments")
        if not isinstance(arguments, dict):
            called = repr(function["name"][:40])
            return Fault(
                "tool_call", f"message {number} calls {called} with arguments that are {kind(arguments)}, not an object"
            )
        entry = {"type": "function", "function": {"name": function["name"], "arguments": _without_nulls(arguments)}}
        listed.append({"id": str(call["id"]), **entry} if call.get("id") else entry)
    return json.dumps(listed, ensure_ascii=False, default=str)


def _unknown_call(extras: Sequence[Extra]) -> Fault | None:
    """A result for a call that no message before it made."""
    made: set[str] = set()
    for number, extra in enumerate(extras, 1):
        if extra.tool_calls:
            made |= {call["id"] for call in json.loads(extra.tool_calls) if "id" in call}
        if extra.tool_call_id and made and extra.tool_call_id not in made:
            return Fault("tool_call", f"message {number} answers the call {extra.tool_call_id!r:.40}, which none made")
    return None


def _content(content: Any, turn: Mapping[str, Any], number: int) -> str | Fault:
    """Content that is no plain text: parts, a number, or nothing usable."""
    if type(content) in (int, float) and not _is_absent(content):
        return repr(content)
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(part, dict) and part.get("type", "text") != "text":
                return Fault("not_text", f"message {number} has a part of the type {part.get('type')!r:.24}")
            if type(text) not in (str, int, float) or _is_absent(text):
                return Fault("wrong_type", f"message {number} has a part that is {kind(text)}, not text")
            texts.append(text if isinstance(text, str) else repr(text))
        return "".join(texts)
    if _is_absent(content):
        field = "content" if "content" in turn else "value" if "value" in turn else None
        what = f"field {field!r} of message {number} is {kind(content)}"
        what = what if field else f"message {number} has no field 'content'"
        return Fault("missing_field", what)
    return Fault("wrong_type", f"the content of message {number} is {kind(content)}, not text")


@lru_cache(maxsize=4096)
def _sequence_fault(roles: tuple[str, ...]) -> Fault | None:
    turns = roles[1:] if roles[:1] == ("system",) else roles
    ends = turns[-1:] in (("assistant",), (_CALLS,))
    if turns[:1] == ("user",) and ends and all(after in _FOLLOWS.get(one, ()) for one, after in pairwise(turns)):
        return None
    shown = ", ".join(roles[:12]) + (f" … ({len(roles)} messages)" if len(roles) > 12 else "")
    return Fault("role_sequence", f"the roles are {shown}" if roles else "there is no message")
