"""What names of cards say, however people, shops and drivers write them: free of the table of cards.

A name is taken apart into words, runs of letters or of digits, so that `RTX4060Ti-16G` and `rtx 4060 ti 16gb` are one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import takewhile
from typing import Final

_VENDORS: Final = {
    "nvidia": "NVIDIA",
    "geforce": "NVIDIA",
    "tesla": "NVIDIA",
    "amd": "AMD",
    "radeon": "AMD",
    "instinct": "AMD",
    "intel": "Intel",
    "arc": "Intel",
    "huawei": "Huawei",
    "ascend": "Huawei",
    "apple": "Apple",
}
"""Makers by their own names and by those of their brands, which a card's name may leave out."""
_BRAND = re.compile("|".join(_VENDORS))
_NOISE: Final = frozenset(
    ("ac", "accelerator", "card", "core", "edition", "generation", "gpu", "graphics", "memory", "oam", "tensor", "vram")
)
"""Words that tell no card from another."""
_SERIES: Final = frozenset(("rtx", "gtx", "rx"))
_JOINED = re.compile(r"(?:quadro|rtx|gtx|rx)(?=[a-z])")
"""What stands before other words without a space: RTXA6000, QuadroRTX."""
_SYNONYMS: Final = {"mobile": "laptop", "notebook": "laptop"}
_MARKS = re.compile(r"\((?:r|tm)\)|[®™_]", re.IGNORECASE)
_REWRITTEN: Final = (
    (re.compile(r"\bgddr\d[a-z]?\b|\bhbm\d?[a-z]?\b"), " "),
    (re.compile(r"sxm\d(?!\d)"), "sxm"),
    (re.compile(r"pci-e|pci[- ]express"), "pcie"),
    (re.compile(r"(?<=\d{4})(ti)?s\b"), r" \1 super"),  # 4080S, 4070TiS
)
_MEMORY: Final = (
    re.compile(r"(?<![a-z0-9])(\d+)\s*gi?b?(?![a-z0-9])"),  # A100 80GB
    re.compile(r"(?<=[a-z])(\d+)\s*gi?b?(?![a-z0-9])"),  # 4060Ti16GB, but A10G is a card
    re.compile(r"(?<=[^a-z0-9])(\d+)\s*$"),  # A100-80, but RTX 4090 is a card
)
"""How a name states its memory, the surest first."""
_GLUED_MEMORY = re.compile(r"(\d+)gi?b?(?![a-z0-9])")
"""In A10040GB only the table tells where the card's number ends."""
_WORD = re.compile(r"[a-z]+|[0-9]+")

_LONGEST: Final = 100
"""More characters than any name has."""
_ALIKE: Final = 0.7
"""Words this much alike are taken for a slip of the finger."""
_TELLING_DIGITS: Final = 3
"""A number of so many digits says as much of a card as its letters do."""


@dataclass(frozen=True)
class CardName:
    """One way to read a name.

    Args:
        words: runs of letters and of digits that tell cards apart, so neither brands nor memory.
        memory_gib: the memory that it states.
        vendors: the makers of its brands.
    """

    words: tuple[str, ...]
    memory_gib: int | None
    vendors: frozenset[str]

    @cached_property
    def telling_words(self) -> tuple[str, ...]:
        """Its words without the series, where the number after it says as much: `3090`, `ti`."""
        words = self.words
        return tuple(word for index, word in enumerate(words) if not _is_said_again(word, words[index + 1 :]))

    @cached_property
    def keys(self) -> tuple[str, str]:
        """What cards of one name have in common: their words, `3090ti`, and the same in any order, `3090 ti`."""
        is_numbered = any(map(str.isdigit, self.words))
        unordered = sorted(word for word in self.telling_words if not is_numbered or word not in _SERIES)
        return "".join(self.telling_words), " ".join(unordered)

    @property
    def letters(self) -> tuple[str, ...]:
        """Its words that are no numbers."""
        return tuple(word for word in self.words if not word.isdigit())

    @property
    def number(self) -> str:
        """The number with the most digits, which is the model's; empty without any."""
        return max(filter(str.isdigit, self.words), key=len, default="")


def readings(name: str) -> Iterator[CardName]:
    """The ways to read a name, the likeliest first; they differ in which of its numbers is taken for the memory."""
    text = unicodedata.normalize("NFKC", _MARKS.sub(" ", name[:_LONGEST])).casefold()
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    stated = [list(pattern.finditer(text)) for pattern in _MEMORY]
    if not stated[0]:
        yield _read(text, None)
    for *_, match in filter(None, stated):
        yield _read(f"{text[: match.start()]} {text[match.end() :]}", int(match[1]))
    glued = _GLUED_MEMORY.search(text)
    if glued is None:
        return
    for num_digits in (1, 2, 3):
        number, memory = glued[1][:-num_digits], glued[1][-num_digits:]
        if number and memory[0] != "0":
            yield _read(f"{text[: glued.start()]}{number} {text[glued.end() :]}", int(memory))


def _read(text: str, memory_gib: int | None) -> CardName:
    words, vendors = [], set()
    for run in _WORD.findall(text):
        word = run
        while brand := _BRAND.match(word):
            vendors.add(_VENDORS[brand[0]])
            word = word[brand.end() :]
        while joined := _JOINED.match(word):
            words.append(joined[0])
            word = word[joined.end() :]
        if word and word not in _NOISE:
            words.append(_SYNONYMS.get(word, word))
    return CardName(tuple(words), memory_gib, frozenset(vendors))


def _is_said_again(word: str, after: Sequence[str]) -> bool:
    """Whether a word is a series before what is of that series alone: a number, `A` and a number, or `PRO`."""
    if word not in _SERIES:
        return False
    first, second = (*after, "", "")[:2]
    return first.isdigit() or first == "pro" or (first == "a" and second.isdigit())


def likeness(asked: CardName, name: CardName) -> float:
    """How much a name is like another, from 0 to 2: what its letters and its number have in common."""
    return _letters_alike(asked.letters, name.letters) + _numbers_alike(asked.number, name.number)


def _letters_alike(asked: Sequence[str], words: Sequence[str]) -> float:
    """The share of words that both have, one that is almost the same counting almost as much."""
    if not asked or not words:
        return 0.0
    best = (max(SequenceMatcher(None, word, other).ratio() for other in words) for word in asked)
    return 2 * sum(ratio for ratio in best if ratio >= _ALIKE) / (len(asked) + len(words))


def _numbers_alike(asked: str, number: str) -> float:
    """How many digits agree from the left, and how near the numbers are; short numbers say little."""
    if not asked or not number:
        return 0.0
    agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, number, strict=False)))
    near = min(int(asked), int(number)) / max(int(asked), int(number), 1)
    return min(1.0, len(asked) / _TELLING_DIGITS) * (agreeing / max(len(asked), len(number)) + near) / 2
