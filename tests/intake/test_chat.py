from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import Invalid
from core.intake import chat, tokenizer
from core.intake.tokenizer import Tokenizer
from tests.intake import models

Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: models.write(root / name, template) for name, template in models.TEMPLATES.items()}
    made["brackets"] = models.write(root / "pieces", models.BRACKETS, sentence_piece=True)
    return made


def dialogue(*turns: str) -> Chat:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def trained_texts(tok: Tokenizer, row: chat.Encoded) -> list[str]:
    """The text of each run of trained tokens."""
    runs, current = [], []
    for token, counted in zip(row.ids.tolist(), row.trained.tolist(), strict=True):
        if counted:
            current.append(token)
        elif current:
            runs.append(tok.decode(current))
            current = []
    return [*runs, tok.decode(current)] if current else runs


_AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
import subprocess
import sys
from pathlib import Path
from threading import Barrier

from core.intake import tokenizer

together = Barrier(4)

def load(_):
    together.wait()
    return tokenizer.load(Path(sys.argv[1]))

with ThreadPoolExecutor(4) as pool:
    found = set(pool.map(load, range(4)))
assert len(found) == 1, found
"""


def test_the_first_to_ask_for_a_tokenizer_may_be_several(folders: dict[str, Path]) -> None:
    """A look at a file and its upload, say, of an API that has just started: transformers is imported once."""
    subprocess.run([sys.executable, "-c", _AT_ONCE, str(folders["chatml"])], check=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["To the sea.<|im_end|>", "Past the mill.<|im_end|>"]),
        ("headers", ["To the sea.<|eot|>", "Past the mill.<|eot|>"]),
        ("brackets", ["To the sea. </s>", "Past the mill. </s>"]),
        ("model_turns", ["To the sea.</turn>", "Past the mill.</turn>"]),
        ("tagged", ["To the sea.<|im_end|>", "Past the mill.<|im_end|>"]),
        ("reasoning", ["To the sea.<|im_end|>", "<think>\n\n</think>\n\nPast the mill.<|im_end|>"]),
        ("unclosed", ["To the sea.\n\n", "Past the mill.\n\n</s>"]),
    ],
)
def test_answers_are_trained_with_the_token_that_ends_them(
    folders: dict[str, Path], name: str, expected: list[str]
) -> None:
    tok = tokenizer.load(folders[name])
    row = chat.encode(tok, dialogue("Where does it go?", "To the sea.", "Which way?", "Past the mill."))
    assert trained_texts(tok, row) == expected


@pytest.mark.parametrize("name", ["chatml", "brackets", "model_turns", "reasoning"])
def test_the_tokens_before_an_answer_are_those_that_the_server_makes_of_its_prompt(
    folders: dict[str, Path], name: str
) -> None:
    tok = tokenizer.load(folders[name])
    messages = dialogue("Where does it go?", "To the sea.", "Which way?", "Past the mill.")
    row = chat.encode(tok, messages)
    starts = np.flatnonzero(row.trained & ~np.append(False, row.trained[:-1]))
    for start, before in zip(starts, (1, 3), strict=True):
        prompt = tok.render(messages[:before], generation_prompt=True)
        assert row.ids[:start].tolist() == tok.encode([prompt])[0].ids.tolist()


def test_a_prompt_whose_last_token_depends_on_what_follows_is_cut_as_the_server_cuts_it(
    folders: dict[str, Path],
) -> None:
    # Two line breaks are one token at a text's end and two before a letter.
    tok = tokenizer.load(folders["headers"])
    messages = dialogue("Where does it go?", "To the sea.")
    row = chat.encode(tok, messages)
    prompt = tok.encode([tok.render(messages[:1], generation_prompt=True)])[0].ids.tolist()
    assert row.ids[: len(prompt)].tolist() == prompt
    assert tok.encode([tok.render(messages)])[0].ids[: len(prompt)].tolist() != prompt


def test_rows_of_a_batch_are_encoded_as_each_alone(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["chatml"])
    rows: list[Chat] = [
        dialogue("One?", "Two."),
        [{"role": "text", "content": "A paragraph."}],
        [{"role": "system", "content": "Be brief."}, *dialogue("Three?", "Four.")],
    ]
    for row, alone in zip(chat.encode_many(tok, rows), [chat.encode(tok, row) for row in rows], strict=True):
        assert row.ids.tolist() == alone.ids.tolist()
        assert row.trained.tolist() == alone.trained.tolist()
        assert row.ids.dtype == np.int32


@pytest.mark.parametrize(
    "answer", ["\nA new line first", "  spaces first", "\n\n  both", "😀 a character of four bytes"]
)
def test_an_answer_that_its_prompt_would_swallow_still_begins_at_a_token(folders: dict[str, Path], answer: str) -> None:
    tok = tokenizer.load(folders["chatml"])
    messages = dialogue("Which?", answer)
    row = chat.encode(tok, messages)
    prompt = tok.encode([tok.render(messages[:1], generation_prompt=True)])[0].ids.tolist()
    assert row.ids[: len(prompt)].tolist() == prompt
    assert not row.trained[: len(prompt)].any()
    assert trained_texts(tok, row) == [answer + "<|im_end|>"]


def test_a_control_token_in_an_answer_does_not_end_it(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["chatml"])
    row = chat.encode(tok, dialogue("How do turns end?", "With <|im_end|> they do."))
    assert trained_texts(tok, row) == ["With <|im_end|> they do.<|im_end|>"]


def test_an_empty_answer_trains_its_end_only(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["chatml"])
    assert trained_texts(tok, chat.encode(tok, dialogue("Anything?", ""))) == ["<|im_end|>"]


def test_an_answer_that_looks_like_the_end_of_turn_is_trained_whole(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["chatml"])
    assert trained_texts(tok, chat.encode(tok, dialogue("A bar?", "|"))) == ["|<|im_end|>"]


def test_plain_text_is_trained_whole_between_bos_and_eos(tmp_path: Path) -> None:
    tok = tokenizer.load(models.write(tmp_path / "base", None, bos=True))
    row = chat.encode(tok, [{"role": "text", "content": "The old bridge."}])
    assert tok.decode(row.ids.tolist()) == "<s>The old bridge.</s>"
    assert row.trained.all()


CALL = {"type": "function", "function": {"name": "tide", "arguments": {"harbour": "Porto"}}}
TOOL = {"type": "function", "function": {"name": "tide", "description": "The next tide.", "parameters": {}}}
ASKED = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Noon."},
    {"role": "assistant", "content": "At noon."},
]


def test_calls_of_tools_are_trained_whole_and_their_results_are_not(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["tools"])
    row = chat.encode(tok, ASKED, [TOOL])
    text = tok.decode(row.ids.tolist())
    assert '"description": "The next tide."' in text
    assert trained_texts(tok, row) == [
        '<|header|>{"name": "tide", "arguments": {"harbour": "Porto"}}<|/header|><|im_end|>',
        "At noon.<|im_end|>",
    ]


def test_a_template_that_would_leave_tools_out_refuses_them_and_says_which(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["chatml"])
    assert tokenizer.load(folders["tools"]).tool_support == (True, True, True)
    assert tok.tool_support == (False, True, False)
    with pytest.raises(Invalid, match="does not write calls of tools and lists of tools") as caught:
        chat.encode(tok, ASKED, [TOOL])
    assert caught.value.code == "tools"


def test_an_answer_of_weight_0_is_read_and_not_trained(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["chatml"])
    messages = dialogue("One?", "Perhaps two.", "Sure?", "Two.")
    row = chat.encode(tok, [messages[0], {**messages[1], "weight": 0}, *messages[2:]])
    assert trained_texts(tok, row) == ["Two.<|im_end|>"]
    assert "Perhaps two." in tok.decode(row.ids.tolist())


def test_a_template_that_forces_words_into_the_answer_is_refused(tmp_path: Path) -> None:
    tok = tokenizer.load(models.write(tmp_path / "forced", models.FORCED_REASONING))
    with pytest.raises(Invalid, match=r"message 2, an answer.*Write the answer as") as caught:
        chat.encode(tok, dialogue("Why?", "Because."))
    assert caught.value.code == "chat_template"


def test_a_role_that_the_template_refuses_is_named(folders: dict[str, Path]) -> None:
    tok = tokenizer.load(folders["model_turns"])
    with pytest.raises(Invalid, match="roles system, user, assistant: system is not known here"):
        chat.encode(tok, [{"role": "system", "content": "secret"}, *dialogue("a", "b")])


def test_a_model_without_template_takes_plain_text_only(tmp_path: Path) -> None:
    tok = tokenizer.load(models.write(tmp_path / "base", None))
    with pytest.raises(Invalid, match="no chat template"):
        chat.encode(tok, dialogue("a", "b"))


def test_without_any_end_of_turn_a_chat_is_refused(tmp_path: Path) -> None:
    tok = tokenizer.load(models.write(tmp_path / "endless", models.UNCLOSED, eos=None))
    with pytest.raises(Invalid, match="Set eos_token"):
        chat.encode(tok, dialogue("a", "b"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["chatml", "headers", "model_turns", "unclosed", "tagged"]),
    turns=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=3).flatmap(
        lambda asked: st.tuples(
            st.just(asked),
            st.lists(
                st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=len(asked), max_size=len(asked)
            ),
        )
    ),
)
def test_any_chat_keeps_its_words_and_trains_its_answers(
    folders: dict[str, Path], name: str, turns: tuple[list[str], list[str]]
) -> None:
    tok = tokenizer.load(folders[name])
    messages = dialogue(*[text for pair in zip(*turns, strict=True) for text in pair])
    row = chat.encode(tok, messages)
    rendered = tok.render(messages)
    assert tok.decode(row.ids.tolist()).removesuffix("</s>") == rendered.removesuffix("</s>")
    texts = trained_texts(tok, row)
    assert len(texts) == len(turns[1])
    for text, answer in zip(texts, turns[1], strict=True):
        assert text.startswith(answer.strip() if name in ("headers", "model_turns") else answer)
        assert text.endswith(
            {
                "chatml": "<|im_end|>",
                "tagged": "<|im_end|>",
                "headers": "<|eot|>",
                "model_turns": "</turn>",
                "unclosed": ("\n\n", "</s>"),
            }[name]
        )
