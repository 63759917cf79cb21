from __future__ import annotations

import pytest

from core.intake.languages import language


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("What is the way to the old harbour, and how long is it?", "en"),
        ("Wie komme ich zu dem Hafen, und ist es nicht zu weit?", "de"),
        ("Où est le port et comment est-ce que je vais dans la ville ?", "fr"),
        ("¿Dónde está el puerto y cómo se llega a la ciudad?", "es"),
        ("Dove è il porto e come si arriva alla città che non conosco?", "it"),
        ("Onde fica o porto e como não se perder na cidade?", "pt"),
        ("Где находится порт?", "ru"),
        ("Де знаходиться порт і як її знайти?", "uk"),
        ("港はどこですか。", "ja"),
        ("港口在哪里？", "zh"),
        ("항구가 어디에 있습니까?", "ko"),
        ("أين الميناء؟", "ar"),
        ("Πού είναι το λιμάνι;", "el"),
        ("बंदरगाह कहाँ है?", "hi"),
        ("12 + 30 = 42", "other"),
        ("", "other"),
    ],
)
def test_a_text_is_told_by_its_script_or_its_small_words(text: str, code: str) -> None:
    assert language(text) == code
