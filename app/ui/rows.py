"""A data set's content as people read it: rows as they are stored, and the packed batch as training sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

import streamlit as st

from app.ui.text import number, percent
from app.ui.theme import colours
from core.api.schemas import DatasetMessage, DatasetRow, PackedPreview, PackedToken, RenderedRow


def _text(message: DatasetMessage) -> str:
    """What a message says, and which tools it calls."""
    calls = [call["function"] for call in message.tool_calls or ()]
    called = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join([*([message.content] if message.content else []), *called])


def row_html(row: DatasetRow) -> str:
    """A row's number, then role and text of each message; the tools that it offers come first."""
    said = [(message.role, _text(message)) for message in row.messages]
    if row.tools:
        said.insert(0, ("tools", ", ".join(tool["function"]["name"] for tool in row.tools)))
    lines = [f'<span class="role">{escape(role)}</span><span class="text">{escape(text)}</span>' for role, text in said]
    return f'<div><span class="at">{row.index}</span>{"".join(lines)}</div>'


def show_rows(rows: Sequence[DatasetRow]) -> None:
    st.html(f'<div class="rows">{"".join(row_html(row) for row in rows)}</div>')


def token_html(token: PackedToken, palette: tuple[str, ...]) -> str:
    """One token: its row's colour, underlined when the loss counts it; a line break is shown and made."""
    text = escape(token.text).replace("\n", "⏎\n")
    counted = "on" if token.trained else "off"
    colour = palette[token.segment % len(palette)]
    return f'<span class="{counted}" style="background:{colour}" title="row {token.segment + 1}">{text}</span>'


def show_rendered(rows: Sequence[RenderedRow]) -> None:
    """Rows as the chat template writes them, with the loss mask."""
    palette = colours().segments
    shown = "".join(
        f"<div><small>row {row.index} · {number(len(row.tokens))} tokens</small><br>"
        f"{''.join(token_html(token, palette) for token in row.tokens)}</div>"
        for row in rows
    )
    st.html(
        '<div class="packed legend"><span class="on">the loss counts it</span>   <span>context only</span></div>'
        f'<div class="packed" data-rendered>{shown}</div>'
    )


def show_packed(preview: PackedPreview) -> None:
    """The first micro-batch: a colour per row, the loss mask, and what is padding."""
    filled = preview.micro_batch_tokens - preview.padding
    st.markdown(
        f"{number(preview.segments)} rows fill {number(filled)} of {number(preview.micro_batch_tokens)} tokens "
        f"({percent(preview.padding / preview.micro_batch_tokens)} % padding); the loss counts "
        f"{number(preview.trained_tokens)} of them. An epoch has {number(preview.micro_batches_per_epoch)} batches."
    )
    palette = colours().segments
    tokens = "".join(token_html(token, palette) for token in preview.tokens)
    padding = f"<div>{number(preview.padding)} tokens of padding</div>" if preview.padding else ""
    st.html(
        '<div class="packed legend"><span class="on">the loss counts it</span>   <span>context only</span>   '
        "<span>one colour per row</span></div>"
        f'<div class="packed" data-packed>{tokens}{padding}</div>'
    )
