"""Which language a text is in: by its script and, in the Latin one, by its most frequent small words.

Rough on purpose: it tells a data set that is not what its owner thinks, and costs microseconds a row. A text without
enough signs of one language is ``other``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from itertools import chain, repeat

OTHER = "other"
_LETTERS = 400
_WORD = re.compile(r"[^\W\d_]+")
# First code point of a block and the language that it speaks for; Latin is looked at by its words, None is no sign.
_BLOCKS: tuple[tuple[int, str | None], ...] = (
    (0, "latin"), (0x250, None), (0x370, "el"), (0x400, "cyrillic"), (0x530, "hy"), (0x590, "he"), (0x600, "arabic"),
    (0x750, None), (0x900, "hi"), (0x980, "bn"), (0xA00, None), (0xB80, "ta"), (0xC00, None), (0xE00, "th"),
    (0xE80, None), (0x10A0, "ka"), (0x1100, "ko"), (0x1200, None), (0x1E00, "latin"), (0x1F00, "el"), (0x2000, None),
    (0x3040, "ja"), (0x3100, None), (0x3400, "zh"), (0xA000, None), (0xAC00, "ko"), (0xD7B0, None),
)  # fmt: skip
_STARTS = [start for start, _ in _BLOCKS]
_WORDS = {
    "en": "the and of to in is that for it with as was on are this be you not what how have from or by",
    "de": "der die das und ist nicht ein eine zu mit den von für auf dem ich sie wie auch wird sich des im",
    "fr": "le la les et est des une pour dans que qui pas sur avec du au ce par je vous nous sont plus",
    "es": "el los las y es una para que en por con del se no como más su lo está qué al son pero",
    "it": "il che di è la per non una sono con del della le gli nel come si più ma anche alla questo",
    "pt": "o os e é uma para que em não com do da no na por se mais como mas dos das você ao",
    "nl": "de het een en van is dat niet in op te met voor zijn ik je aan ook maar worden bij als",
    "sv": "och att det som en är på av för med den till inte om ett jag har de vi kan från",
    "pl": "i w na nie to się jest że z do jak co za od po ale czy tak są przez dla jego",
    "tr": "ve bir bu için ne ile da de çok daha gibi olarak var en ben sen nasıl mi değil ki",
    "id": "yang dan di untuk dengan tidak ini itu dari adalah pada ke saya akan apa bisa juga oleh",
    "vi": "và của là có không cho được trong một những với các này khi người đã như để tôi",
}  # fmt: skip
_SPEAKS: dict[str, set[str]] = {}
for _language, _words in _WORDS.items():
    for _word in _words.split():
        _SPEAKS.setdefault(_word, set()).add(_language)


def language(text: str) -> str:
    """ISO 639-1 code of the text's language, told from its first letters."""
    text = text[:_LETTERS]
    if text.isascii():
        return _latin(text.lower())
    signs: Counter[str | None] = Counter()
    for letter, count in Counter(text).items():
        if letter.isalpha():
            signs[_BLOCKS[bisect_right(_STARTS, ord(letter)) - 1][1]] += count
    signs.pop(None, None)
    if not signs:
        return OTHER
    # Japanese is written with Chinese characters, too.
    if signs["ja"] and signs["ja"] + signs["zh"] > signs["latin"]:
        return "ja"
    script = signs.most_common(1)[0][0] or OTHER
    lower = text.lower()
    if script == "cyrillic":
        return "uk" if any(letter in lower for letter in "іїєґ") else "ru"
    if script == "arabic":
        return "fa" if any(letter in lower for letter in "پچژگ") else "ar"
    return _latin(lower) if script == "latin" else script


def _latin(text: str) -> str:
    votes = Counter(chain.from_iterable(map(_SPEAKS.get, _WORD.findall(text), repeat(()))))
    (first, most), (_, next_) = [*votes.most_common(2), (OTHER, 0), (OTHER, 0)][:2]
    return first if most >= 2 and most > next_ else OTHER
