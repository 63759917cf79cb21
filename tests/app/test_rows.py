"""Rows and the packed batch as HTML: what is in a data set never becomes markup."""

from __future__ import annotations

from app.ui.rows import row_html, token_html
from core.api.schemas import DatasetMessage, DatasetRow, PackedToken

PALETTE = ("#111111", "#222222")


def test_markup_in_a_row_is_text() -> None:
    row = DatasetRow(index=3, messages=[DatasetMessage(role="user", content="<script>alert(1)</script> & co")])
    assert "<script>" not in row_html(row)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in row_html(row)


def test_markup_in_a_token_is_text() -> None:
    assert "&lt;|im_end|&gt;" in token_html(PackedToken(text="<|im_end|>", segment=0, trained=False), PALETTE)


def test_the_loss_mask_and_the_row_are_visible() -> None:
    counted = token_html(PackedToken(text="Aye", segment=0, trained=True), PALETTE)
    context = token_html(PackedToken(text="Who", segment=1, trained=False), PALETTE)
    assert 'class="on"' in counted
    assert "#111111" in counted
    assert 'class="off"' in context
    assert "#222222" in context


def test_colours_come_round() -> None:
    assert "#111111" in token_html(PackedToken(text="x", segment=2, trained=False), PALETTE)


def test_a_line_break_is_shown_and_made() -> None:
    assert "⏎\n" in token_html(PackedToken(text="\n", segment=0, trained=False), PALETTE)
