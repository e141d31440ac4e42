"""BERT's tokenizer for uncased models: words and punctuation, then the longest known pieces of each word.

The same tokens as the reference implementation (google-research/bert, ``tokenization.py``) gives; a test compares.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

from hemiola.errors import InputError
from hemiola.lab.tasks.readers import reading

PAD, UNKNOWN, START, SEPARATOR = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
LONGEST_WORD = 100

# The blocks of Unicode that hold Chinese characters, each of which is a word of its own.
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """Text to token numbers.

    Args:
        path: ``vocab.txt``, one token a line; a token's number is its line, from 0.
    """

    def __init__(self, path: Path) -> None:
        with reading(path):
            self.numbers = {token: number for number, token in enumerate(path.read_text("utf-8").splitlines())}
        absent = [token for token in (PAD, UNKNOWN, START, SEPARATOR) if token not in self.numbers]
        if absent:
            raise InputError(f"cannot read {path}: no line {', '.join(absent)}")
        self.pad, self.separator = self.numbers[PAD], self.numbers[SEPARATOR]
        self._known: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str], longest: int) -> list[int]:
        """``[CLS] text [SEP]`` of one text, ``[CLS] one [SEP] other [SEP]`` of two, at most ``longest`` tokens.

        What is too long loses tokens at the end of its longer text, of the second where both are as long.
        """
        parts = [[number for chunk in text.split(" ") for number in self._pieces(chunk)] for text in texts]
        while sum(map(len, parts)) + len(parts) + 1 > longest:
            max(reversed(parts), key=len).pop()
        encoded = [self.numbers[START]]
        for part in parts:
            encoded += [*part, self.separator]
        return encoded

    def _pieces(self, chunk: str) -> list[int]:
        """Tokens of what stands between two spaces, remembered: texts repeat their words."""
        if chunk not in self._known:
            self._known[chunk] = [number for word in words(chunk) for number in self._split(word)]
        return self._known[chunk]

    def _split(self, word: str) -> list[int]:
        """The longest piece that is known, then the longest of the rest; unknown as a whole if that fails anywhere."""
        pieces, start = [], 0
        while start < len(word) <= LONGEST_WORD:
            for end in range(len(word), start, -1):
                piece = self.numbers.get(("##" if start else "") + word[start:end])
                if piece is not None:
                    break
            else:
                return [self.numbers[UNKNOWN]]
            pieces.append(piece)
            start = end
        return pieces or [self.numbers[UNKNOWN]]


def words(text: str) -> list[str]:
    """Lower-case words without accents; each punctuation mark and each Chinese character is a word of its own."""
    spaced = []
    for character in text:
        if character in "\t\n\r" or unicodedata.category(character) == "Zs":
            spaced.append(" ")
        elif character in "\0\ufffd" or unicodedata.category(character).startswith("C"):
            continue
        elif any(first <= ord(character) <= last for first, last in _CHINESE):
            spaced.append(f" {character} ")
        else:
            spaced.append(character)
    plain = unicodedata.normalize("NFD", "".join(spaced).lower())
    marked = (
        f" {character} " if _is_punctuation(character) else character
        for character in plain
        if unicodedata.category(character) != "Mn"
    )
    return "".join(marked).split()


def _is_punctuation(character: str) -> bool:
    """Unicode's punctuation, and ASCII's other signs such as $ and ^."""
    ascii_sign = character.isascii() and character.isprintable() and not character.isalnum() and character != " "
    return ascii_sign or unicodedata.category(character).startswith("P")
