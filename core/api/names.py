"""Names that the API takes, out of what people call things."""

from __future__ import annotations

import re
from pathlib import Path

from core.errors import Invalid

_ENDINGS = r"\.(jsonl?|csv|tsv|txt|parquet|arrow|gz|zst|zip|tar|tgz|safetensors)$"


def name_of(label: str) -> str:
    """A name that the API takes, from a file's: its stem in lower case, other signs as dashes."""
    stem = Path(label).name
    while (shorter := re.sub(_ENDINGS, "", stem)) != stem:
        stem = shorter
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:63]
    if not name:
        raise Invalid("name_missing", f"no name can be made of the file name {label!r}; give one", "name")
    return name
