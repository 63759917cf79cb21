from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import Invalid, NotFound
from core.intake import chat, dataset, packing, rows, tokenizer
from core.intake.tokenizer import Tokenizer
from tests.intake import models

ROWS = [
    {"prompt": f"Question {n}?", "completion": "An answer" + " and more" * ((n * 5) % 7) + f" {n}."} for n in range(60)
]


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer.load(models.write(tmp_path_factory.mktemp("model"), models.CHATML))


def stored(folder: Path, tok: Tokenizer | None) -> Path:
    source = folder / "data.jsonl"
    source.write_text("\n" + "".join(json.dumps(row) + "\n" for row in ROWS))
    dataset.ingest(source, folder / "rows.parquet", filename=source.name, tokenizer=tok)
    return folder / "rows.parquet"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tok: Tokenizer) -> Path:
    return stored(tmp_path_factory.mktemp("stored"), tok)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_page_of_rows_ends_with_the_data_set(path: Path) -> None:
    assert rows.count(path) == 60
    page = rows.read(path, 57, 10)
    assert [row.index for row in page] == [57, 58, 59]
    assert [message.role for message in page[0].messages] == ["user", "assistant"]
    assert page[0].messages[0].content == "Question 57?"
    assert rows.read(path, 60, 10) == []


def test_rows_are_taken_in_the_order_asked_for(path: Path) -> None:
    assert [row.messages[0]["content"] for row in rows.take(path, [5, 59, 5, 0])] == [
        "Question 5?", "Question 59?", "Question 5?", "Question 0?",
    ]  # fmt: skip


def test_the_longest_row_is_known_with_its_line(path: Path, tok: Tokenizer) -> None:
    counts = [len(row.ids) for row in packing.load_encoded(path, tok)]
    found = rows.longest(path)
    assert found is not None
    index, line, tokens = found
    assert tokens == counts[index] == max(counts)
    assert line == index + 2 == rows.line(path, index)


def test_without_token_counts_there_is_no_longest_row(tmp_path: Path) -> None:
    assert rows.longest(stored(tmp_path, None)) is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no data set file .*gone\.parquet"):
        rows.count(tmp_path / "gone.parquet")


def test_stored_lengths_hold_for_the_tokenizer_that_counted_them_only(
    path: Path, tok: Tokenizer, tmp_path: Path
) -> None:
    assert rows.lengths(path, tok) == [len(row.ids) for row in packing.load_encoded(path, tok)]
    other = tokenizer.load(models.write(tmp_path / "other", models.HEADERS))
    assert rows.lengths(path, other) is None


def test_stored_tokens_are_those_of_encoding_anew(path: Path, tok: Tokenizer) -> None:
    anew = [row for chunk in rows.chunks(path, 7) for row in chat.encode_many(tok, [one.messages for one in chunk])]
    loaded, some = packing.load_encoded(path, tok), packing.encoded_rows(path, tok, [59, 3, 59])
    for one, other in [*zip(loaded, anew, strict=True), *zip(some, [anew[59], anew[3], anew[59]], strict=True)]:
        assert one.ids.tolist() == other.ids.tolist()
        assert one.trained.tolist() == other.trained.tolist()
        assert (one.ids.dtype, one.trained.dtype) == (other.ids.dtype, other.trained.dtype)


def test_rows_are_shown_as_the_model_sees_them(path: Path, tok: Tokenizer) -> None:
    (row,) = packing.rendered(path, tok, 59, 5)
    assert row.index == 59
    assert "".join(token.text for token in row.tokens) == tok.render(rows.take(path, [59])[0].messages)
    assert "".join(token.text for token in row.tokens if token.trained).startswith("An answer")


def test_a_tokenizer_is_loaded_once_until_its_files_change(tmp_path: Path) -> None:
    folder = models.write(tmp_path / "model", models.CHATML)
    first = tokenizer.load(folder)
    assert tokenizer.load(folder) is first
    (folder / "chat_template.jinja").write_text(models.HEADERS)
    assert tokenizer.load(folder).fingerprint != first.fingerprint


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"No tokenizer can be loaded from .*nothing"):
        tokenizer.load(tmp_path / "nothing")


# ---- preview ---------------------------------------------------------------------------------------------------------


def test_the_preview_is_the_first_micro_batch_of_training(path: Path, tok: Tokenizer) -> None:
    shown = packing.preview(path, tok, micro_batch_tokens=128, sequence_length=100, seed=3, evaluation_fraction=0.1)
    encoded = packing.load_encoded(path, tok)
    training, _ = packing.split(len(encoded), 0.1, 3)
    plan = packing.epoch_plan([len(encoded[row].ids) for row in training], 128, seed=3, epoch=0)
    batch = packing.build([encoded[training[at]] for at in plan[0]], 128)
    assert (shown.segments, shown.padding, shown.trained_tokens) == (len(plan[0]), 128 - batch.tokens, batch.trained)
    assert shown.micro_batches_per_epoch == len(plan)
    assert [token.segment for token in shown.tokens] == batch.segments[: batch.tokens].tolist()
    assert "".join(token.text for token in shown.tokens) == tok.decode(batch.ids[: batch.tokens].tolist())
    # A token is shown as trained where the label of the position before it asks for it.
    trained = [False, *(batch.labels[: batch.tokens - 1] != packing.IGNORED).tolist()]
    assert [token.trained for token in shown.tokens] == trained


def test_the_preview_does_not_need_stored_counts(path: Path, tok: Tokenizer, tmp_path: Path) -> None:
    uncounted = stored(tmp_path, None)
    options = {"micro_batch_tokens": 128, "sequence_length": 128, "seed": 0}
    assert packing.preview(uncounted, tok, **options) == packing.preview(path, tok, **options)


@pytest.mark.parametrize(
    ("sequence_length", "micro_batch_tokens", "field"),
    [(32, 128, "sequence_length"), (128, 40, "micro_batch_tokens")],
)
def test_a_row_too_long_is_named_by_row_line_and_limit(
    path: Path, tok: Tokenizer, sequence_length: int, micro_batch_tokens: int, field: str
) -> None:
    found = rows.longest(path)
    assert found is not None
    with pytest.raises(Invalid) as caught:
        packing.preview(path, tok, micro_batch_tokens=micro_batch_tokens, sequence_length=sequence_length, seed=0)
    assert caught.value.message == (
        f"Row {found[0]} (line {found[1]} of the file) has {found[2]} tokens, {field} is "
        f"{min(sequence_length, micro_batch_tokens)}. Raise {field} to {found[2]} or more, or shorten the row."
    )
    assert caught.value.param == field


def test_intake_is_imported_without_torch() -> None:
    script = (
        "import sys, core.intake.dataset, core.intake.packing, core.intake.adapter;"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
