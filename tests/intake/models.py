"""Small tokenizers with the chat templates that families of models use, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "Where does the river go? It runs down to the sea, past the mill and the old bridge.",
    "A question and an answer; a number such as 1024, a list: one, two, three.\n\nNew paragraph.",
    # White space often enough to become tokens of its own, which a prompt's end and an answer's beginning can share.
    "verse\n  one\n  two\n\n\n  three\n\n  four\n\n" * 8,
    "user assistant system model instruction response think",
]

CHATML = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""

HEADERS = """
{{- bos_token -}}
{%- for m in messages -%}
{{ '<|header|>' + m.role + '<|/header|>\n\n' + m.content | trim + '<|eot|>' }}
{%- endfor -%}
{{ '<|header|>assistant<|/header|>\n\n' if add_generation_prompt else '' }}"""

BRACKETS = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}
{%- else %}{{ raise_exception('only user and assistant are known here') }}{% endif -%}
{%- endfor -%}"""

MODEL_TURNS = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' %}{{ raise_exception('system is not known here') }}{% endif -%}
{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}
{%- endfor -%}
{{ '<turn>model\n' if add_generation_prompt else '' }}"""

REASONING = """
{%- for m in messages -%}
{%- if m.role == 'assistant' and loop.last -%}
{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""

FORCED_REASONING = """
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}
{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt else '' }}"""

TAGGED = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}
{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt else '' }}"""

UNCLOSED = """
{%- for m in messages -%}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{%- endfor -%}
{{ '### assistant:\n' if add_generation_prompt else '' }}"""

TOOLS = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for t in tools %}{{ t.function | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{{ '<|im_start|>assistant\n' + m.content }}
{%- for call in m.tool_calls %}{{ '<|header|>' + call.function | tojson + '<|/header|>' }}{% endfor -%}
{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "brackets": BRACKETS,
    "model_turns": MODEL_TURNS,
    "reasoning": REASONING,
    "tagged": TAGGED,
    "unclosed": UNCLOSED,
    "tools": TOOLS,
}
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "<turn>", "</turn>"]


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIALS
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return str(tokenizer.to_str())


@cache
def _sentence_piece() -> str:
    """Spaces become ▁, one is put before the text: the older kind, whose tokens depend on what is before them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<s>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    made = json.loads(tokenizer.to_str())
    # Bytes are ordinary tokens; the trainer can only be given them as special ones.
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in SPECIALS]
    return json.dumps(made)


def write(
    folder: Path, template: str | None, *, eos: str | None = "</s>", sentence_piece: bool = False, bos: bool = False
) -> Path:
    """A model folder that holds a tokenizer only."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_sentence_piece() if sentence_piece else _byte_level())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
