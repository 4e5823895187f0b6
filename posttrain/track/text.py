"""What models, tools and data sets say, made safe for a terminal."""

from __future__ import annotations

import re

# Control characters of ASCII and Latin-1 (escape sequences begin with one), marks that change the direction of text,
# characters without width, line ends of Unicode.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


def printable(text: str, keep: str = "\n\t") -> str:
    """``text`` with characters that are not seen, or that a terminal obeys, as escapes; but for those in ``keep``."""
    seen = _UNSEEN.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)
    return seen.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, width: int) -> str:
    """``text`` in one line of at most so many characters: its beginning and its end."""
    line = " ".join(printable(text).split())
    if len(line) <= width:
        return line
    tail = width // 3
    return f"{line[: width - tail - 3].rstrip()} … {line[-tail:].lstrip()}"


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
