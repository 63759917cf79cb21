"""The served model's tokenizer and chat template, as intake needs them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

from core import torchvision_ops
from core.errors import Invalid

Messages = Sequence[Mapping[str, Any]]
"""Each with role and content, and where they apply tool_calls, name, tool_call_id, weight."""
Tools = Sequence[Mapping[str, Any]]
"""What a chat offers to the model, each ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
Span = tuple[int, int]


class Tokens(NamedTuple):
    """Token ids of a text and the characters [starts, ends) that each covers; int32 arrays of one length."""

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]


class ToolSupport(NamedTuple):
    """Whether a chat template writes the calls of tools, their results and the list of those there are."""

    calls: bool
    results: bool
    lists: bool


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template. Get one from `load`.

    `stop_ids` are the tokens that may end a turn: the special tokens, the tokenizer's EOS and those of
    generation_config.json. `fingerprint` changes when the tokenizer or its template does, so that stored token counts
    can be told to be stale.
    """

    def __init__(self, path: Path) -> None:
        torchvision_ops.declare()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.path = path
        # Only a folder without tokenizer.json needs AutoTokenizer, which imports the model's code and 300 MiB with it.
        kind = PreTrainedTokenizerFast if (path / "tokenizer.json").exists() else AutoTokenizer
        try:
            hugging_face = kind.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a folder that it cannot read
            raise Invalid(
                "tokenizer_unreadable",
                f"No tokenizer can be loaded from {path} ({error}). Name a Hugging Face model folder with its "
                "tokenizer.json.",
                "model",
            ) from error
        self._with_specials: FastTokenizer = hugging_face.backend_tokenizer
        # Without the post-processor offsets keep the spaces that belong to a token, and no BOS is added to a rendered
        # chat, which has it already.
        self._plain = FastTokenizer.from_str(self._with_specials.to_str())
        self._plain.post_processor = None
        for fast in (self._with_specials, self._plain):
            fast.no_truncation()
            fast.no_padding()
        self._template: str | None = hugging_face.get_chat_template() if hugging_face.chat_template else None
        self._template_variables: dict[str, Any] = dict(hugging_face.special_tokens_map)
        self.eos_id: int | None = hugging_face.eos_token_id
        added = self._plain.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.stop_ids = self.special_ids | _generation_eos(path) | ({self.eos_id} if self.eos_id is not None else set())
        self.segment_ids = lru_cache(maxsize=4096)(self._segment_ids)

    @cached_property
    def fingerprint(self) -> str:
        parts = (self._with_specials.to_str(), self._template or "", str(sorted(self.stop_ids)))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def special_texts(self) -> list[str]:
        """How the control tokens are spelt; such a text inside a message turns into the token."""
        return [token.content for token in self._plain.get_added_tokens_decoder().values() if token.special]

    @property
    def has_generation_tags(self) -> bool:
        """Whether the template marks the assistant's part with ``{% generation %}``."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._template or "") is not None

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Told by rendering: a template that does not know tools leaves them out without a word."""
        name, argument, result, listed = "fetch_tide", "Lisbon", "low at noon", "sound_horn"
        call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": {"harbour": argument}}}
        parameters = {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "tool_call_id": "call00001", "content": result},
            {"role": "assistant", "content": "At noon."},
        ]
        tool = {"name": listed, "description": "Sound the horn.", "parameters": parameters}
        try:
            text = self.render(messages, [{"type": "function", "function": tool}])
        except Invalid:
            return ToolSupport(False, False, False)
        return ToolSupport(name in text and argument in text, result in text, listed in text)

    def render(self, messages: Messages, tools: Tools | None = None, *, generation_prompt: bool = False) -> str:
        """The chat as the model's template writes it; with `generation_prompt` ready for the next answer.

        Raises Invalid when the model has no template or the template refuses the chat.
        """
        return self._render(messages, tools, generation_prompt=generation_prompt, spans=False)[0]

    def render_spans(self, messages: Messages, tools: Tools | None = None) -> tuple[str, list[Span]]:
        """The rendered chat and the characters that the template's ``{% generation %}`` blocks produced."""
        return self._render(messages, tools, generation_prompt=False, spans=True)

    def _render(
        self, messages: Messages, tools: Tools | None, *, generation_prompt: bool, spans: bool
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._template is None:
            raise Invalid(
                "no_chat_template",
                f"The model in {self.path} has no chat template, so conversations and prompt/completion rows cannot "
                "be written for it. Serve an instruction-tuned model, or upload plain text rows.",
                "model",
            )
        try:
            # Annotated as one string upstream; it is a pair of lists, one entry per conversation.
            rendered, generated = cast(
                "tuple[list[str], list[list[Span]]]",
                render_jinja_template(
                    conversations=[[dict(message) for message in messages]],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    chat_template=self._template,
                    return_assistant_tokens_mask=spans,
                    add_generation_prompt=generation_prompt,
                    **self._template_variables,
                ),
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise Invalid(
                "chat_template",
                f"The model's chat template refuses the roles {roles}: {error}. Bring the row to a sequence that the "
                "model knows.",
                "messages",
            ) from error
        return rendered[0], list(generated[0]) if spans else []

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokens of rendered chats; special tokens in the text are recognised, none is added."""
        return [_tokens(encoding) for encoding in self._plain.encode_batch(list(texts), add_special_tokens=False)]

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Token ids of plain texts, with the BOS that the tokenizer puts before a text and one EOS behind it."""
        documents = []
        for encoding in self._with_specials.encode_batch(list(texts), add_special_tokens=True):
            ids = list(encoding.ids)
            if self.eos_id is not None and (not ids or ids[-1] != self.eos_id):
                ids.append(self.eos_id)
            documents.append(np.asarray(ids, dtype=np.int32))
        return documents

    def _segment_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a short text that comes back often; `segment_ids` is the cached form."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        text: str = self._plain.decode(list(ids), skip_special_tokens=False)
        return text


def _tokens(encoding: Any) -> Tokens:
    offsets = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    return Tokens(np.asarray(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])


def _generation_eos(path: Path) -> set[int]:
    config = path / "generation_config.json"
    if not config.exists():
        return set()
    eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


_loading = Lock()


@cache
def _load(path: Path, _stamp: tuple[int, ...]) -> Tokenizer:
    return Tokenizer(path)


def load(model_path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder; one per folder, read again when its files have changed.

    The first call imports transformers (seconds). Raises Invalid when the folder has no readable tokenizer.
    """
    path = model_path.expanduser().resolve()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    stamp = tuple((path / name).stat().st_mtime_ns if (path / name).exists() else 0 for name in names)
    # transformers fills itself in as it is asked for parts, and cannot be asked by two threads while it is imported.
    with _loading:
        return _load(path, stamp)
