"""Words of passages and queries, cut by the same rules on both sides.

1. NFKC, then `casefold`, then NFKD (casefolding can leave compatibility forms behind).
2. Combining marks (categories Mn, Mc, Me) and invisible format characters (Cf: soft hyphens,
   joiners, direction marks) are dropped, so "Beyoncé" is "beyonce" however it is encoded. The
   price: Japanese voicing marks and the vowel signs of Indic scripts go too, on both sides alike.
3. What is left is composed again (Hangul syllables) and cut into runs of letters and digits.
   Single characters are kept ("Plan B", "vitamin C"); underscores and apostrophes separate.
4. Scripts written without spaces (Han, kana, Thai, Lao, Khmer, Burmese) are cut into single
   characters: a query for 東京 then finds every passage with 東 and 京, those with both first.
   Hangul has spaces and stays in words.

Change `VERSION` with the rules: it is part of an index's key.
"""

from __future__ import annotations

import re
import unicodedata

VERSION = "1"

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fd-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
_WORDS = re.compile(f"(?:(?![{_UNSPACED}])[^\\W_])+|[{_UNSPACED}](?<=\\w)")
_ASCII_WORDS = re.compile(r"[a-z0-9]+")


class _Filter(dict[int, str | int | None]):
    """A `str.translate` table filled as characters are met: marks and format characters go."""

    def __missing__(self, code: int) -> str | int | None:
        dropped = unicodedata.category(chr(code)) in ("Mn", "Mc", "Me", "Cf")
        self[code] = None if dropped else code
        return self[code]


# The zero-width space marks a word boundary; every other format character is inside a word.
_FILTER = _Filter({0x200B: " "})


def words(text: str) -> list[str]:
    """The tokens of a text, in order, repeats included; [] where there are none."""
    if text.isascii():  # nothing to fold but case: six times as fast
        return _ASCII_WORDS.findall(text.lower())
    folded = unicodedata.normalize("NFKC", text).casefold()
    bare = unicodedata.normalize("NFKD", folded).translate(_FILTER)
    return _WORDS.findall(unicodedata.normalize("NFC", bare))
