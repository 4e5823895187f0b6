"""Which training prompts are also in an evaluation set: normalised 13-grams, as in GPT-3 (arXiv:2005.14165, app. C).

A text is normalised to its words: compatibility forms (NFKC), lower case, no punctuation; a Chinese, Japanese or Korean
character is a word. A prompt overlaps an evaluation prompt if they share 13 words in a row, or if all of their words
are the same, however few. Operators are no words, so "1 + 2" and "1 - 2" are the same here: rather one row too many is
dropped than one too few. What all prompts of one data source begin or end with, such as "Let's think step by step", is
an instruction and is left out first; else every prompt with the same instruction would overlap. Five words in a row or
more that all prompts of both sides have elsewhere, such as "Your code should pass these tests", count as one word.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NGRAM = 13
"""Words in a row that two prompts share by copying, not by chance."""
_GROUP = 5
"""From so many prompts of one source on, what they all share is an instruction and not a coincidence."""
_PHRASE = 5
"""Words in a row within a prompt that may be an instruction."""

# A run of letters and digits, but each ideograph, kana or hangul syllable alone: these scripts do not mark words.
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
# Of ASCII text the same, several times as fast: letters in lower case, digits, and a space for everything else.
_ASCII = bytes(ord(c.lower()) if c.isascii() and c.isalnum() else ord(" ") for c in map(chr, range(256)))

Hashes = npt.NDArray[np.uint64]
Words = list[str]


def words(text: str) -> Words:
    """The normalised words of a text."""
    if text.isascii():
        return text.encode().translate(_ASCII).decode().split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


class PromptText(NamedTuple):
    """A prompt, for comparing."""

    own: Words
    """Its words without its data source's instruction."""
    whole: str
    """All of its words."""
    phrases: frozenset[str] = frozenset()
    """Runs of ``_PHRASE`` of its own words that all prompts of its data source have."""


def asked(texts: Sequence[str], sources: Sequence[str]) -> list[PromptText]:
    """Prompts for comparing, with and without what all prompts of a data source begin or end with.

    Args:
        texts: the prompts.
        sources: the data source of each.
    """
    split = [words(text) for text in texts]
    groups: dict[str, list[Words]] = defaultdict(list)
    for prompt, source in zip(split, sources, strict=True):
        groups[source].append(prompt)
    affixes = {source: _affixes(group) for source, group in groups.items()}
    own = [prompt[affixes[of][0] : len(prompt) - affixes[of][1]] for prompt, of in zip(split, sources, strict=True)]
    groups = defaultdict(list)
    for prompt, source in zip(own, sources, strict=True):
        groups[source].append(prompt)
    phrases = {source: _phrases(group) for source, group in groups.items()}
    return [
        PromptText(short, " ".join(prompt), phrases[source])
        for prompt, short, source in zip(split, own, sources, strict=True)
    ]


def _affixes(group: Sequence[Words]) -> tuple[int, int]:
    """Words that all prompts share at the start and at the end; none where they are few, or all the same."""
    low, high = min(group), max(group)
    if len(group) < _GROUP or low == high:
        return 0, 0
    start = _common(low, high)
    rest = [prompt[start:][::-1] for prompt in group]
    return start, _common(min(rest), max(rest))


def _phrases(group: Sequence[Words]) -> frozenset[str]:
    """Runs of ``_PHRASE`` words that all prompts have; none where they are few, or all the same."""
    if len(group) < _GROUP or min(group) == max(group):
        return frozenset()
    runs = set(_runs(min(group, key=len)))
    for prompt in group:
        if not runs:
            break
        text = f" {' '.join(prompt)} "
        runs = {run for run in runs if f" {run} " in text}
    return frozenset(runs)


def _runs(prompt: Words) -> list[str]:
    return [" ".join(prompt[i : i + _PHRASE]) for i in range(len(prompt) - _PHRASE + 1)]


def _joined(prompt: Words, phrases: frozenset[str]) -> Words:
    """A prompt in which words of such phrases that follow each other are one word."""
    if not phrases:
        return prompt
    joined: Words = []
    end = 0
    starts = {i for i, run in enumerate(_runs(prompt)) if run in phrases}
    for i, word in enumerate(prompt):
        if i < end:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
        if i in starts:
            end = i + _PHRASE
    return joined


def _common(a: Words, b: Words) -> int:
    """Return how many first words all of some sorted lists share, given the first and the last list."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@dataclass(frozen=True)
class Overlap:
    """A training prompt that shares words with an evaluation prompt."""

    row: int
    """Index of the training prompt."""
    eval_row: int
    """Index of the (first) evaluation prompt that it overlaps."""
    shared: str
    """The words in a row that they share."""


class EvalSet:
    """The prompts of an evaluation set, compared with many training prompts at once."""

    def __init__(self, prompts: Sequence[PromptText]) -> None:
        """Index evaluation prompts."""
        self._same: dict[str, int] = {}
        for row, prompt in enumerate(prompts):
            self._same.setdefault(prompt.whole, row)
            self._same.setdefault(" ".join(prompt.own), row)
        self._same.pop("", None)
        self._own = [prompt.own for prompt in prompts]
        self._phrases = _phrases_of(prompts)
        self._indexes: dict[frozenset[str], _Index] = {}
        """By the phrases that count as one word."""

    def overlaps(self, prompts: Sequence[PromptText]) -> list[Overlap]:
        """The first overlap of each training prompt that has one, by row."""
        found: dict[int, Overlap] = {}
        for row, prompt in enumerate(prompts):
            for form in (prompt.whole, " ".join(prompt.own)):
                if form in self._same:
                    found.setdefault(row, Overlap(row, self._same[form], form))
        phrases = self._phrases & _phrases_of(prompts)
        if phrases not in self._indexes:
            self._indexes[phrases] = _Index(_Text([_joined(own, phrases) for own in self._own]))
        for overlap in self._indexes[phrases].hits(_Text([_joined(prompt.own, phrases) for prompt in prompts])):
            found.setdefault(overlap.row, overlap)
        return [found[row] for row in sorted(found)]


def _phrases_of(prompts: Sequence[PromptText]) -> frozenset[str]:
    return frozenset().union(*{prompt.phrases for prompt in prompts})


class _Index:
    """The runs of 13 words of evaluation prompts."""

    def __init__(self, text: _Text) -> None:
        self._text = text
        self._vocabulary = {word: i for i, word in enumerate(dict.fromkeys(text.flat), start=1)}
        inside = text.inside()
        # Of equal n-grams the first stays, so that an overlap names the first evaluation prompt that has it.
        self._hashes, first = np.unique(self._hashed(text.flat)[inside], return_index=True)
        self._positions = inside[first]

    def hits(self, text: _Text) -> Iterator[Overlap]:
        """Yield the runs of a text that are in the index, in its order."""
        inside = text.inside()
        if not len(inside) or not len(self._hashes):
            return
        hashes = self._hashed(text.flat)[inside]
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        for hit in np.flatnonzero(self._hashes[places] == hashes).tolist():
            mine, other = int(inside[hit]), int(self._positions[places[hit]])
            gram = text.flat[mine : mine + NGRAM]
            if gram == self._text.flat[other : other + NGRAM]:  # else two n-grams with one hash
                yield Overlap(int(text.owners[mine]), int(self._text.owners[other]), " ".join(gram))

    def _hashed(self, flat: Words) -> Hashes:
        """[max(0, len(flat) - 12)] a hash of each run of 13 words; words that no evaluation prompt has are all one."""
        ids = np.fromiter(map(self._vocabulary.get, flat, repeat(0)), dtype=np.uint64, count=len(flat))
        count = max(0, len(flat) - NGRAM + 1)
        value = np.zeros(count, dtype=np.uint64)
        for offset in range(NGRAM):
            value *= _FACTOR
            value += ids[offset : offset + count]
        return value


_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with bits of both kinds everywhere: 2^64 divided by the golden ratio."""


class _Text:
    """Prompts in one row of words."""

    def __init__(self, prompts: Sequence[Words]) -> None:
        self.flat = [word for prompt in prompts for word in prompt]
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        self.owners: npt.NDArray[np.int64] = np.repeat(np.arange(len(prompts)), lengths)
        """[words] the prompt of each word."""

    def inside(self) -> npt.NDArray[np.int64]:
        """Where 13 words in a row start that are of one prompt."""
        count = max(0, len(self.flat) - NGRAM + 1)
        return np.flatnonzero(self.owners[:count] == self.owners[NGRAM - 1 : NGRAM - 1 + count])
