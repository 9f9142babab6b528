"""The word that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'gpus'?`, or the list of all when none is near."""
    words = sorted(known)
    close = difflib.get_close_matches(word.lower().replace("-", "_"), words, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(words)}"
