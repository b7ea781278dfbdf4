"""HTML that cannot carry a run's text as markup.

In: texts and numbers from a run, which are all untrusted. Out: `Html`, a string that is known to be markup. `el` is the
only way to make it, and escapes every child that is not `Html` already, so that a page has to ask for a mistake.

A control character, a lone surrogate or a direction override would break the page or make a log read differently from
what it says; they are shown as visible signs.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, urlencode

VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
# C0 and C1 but tab and newline, surrogates, and what changes the direction or order of the text around it.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Html(str):
    """Markup. Made by `el` and `join`; anything else is text."""

    __slots__ = ()


def visible(text: str) -> str:
    """The text with what cannot be seen replaced: control characters by their pictures, others by their code point."""
    return _UNSEEN.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"


def escape(value: object) -> Html:
    """Text as markup that shows exactly this text."""
    return value if isinstance(value, Html) else Html(html.escape(visible(str(value)), quote=True))


def join(*children: object) -> Html:
    """Children one after another; None is nothing, an iterable is its items."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str | int | float):
            parts.append(escape(child))
        elif isinstance(child, Iterable):
            parts.append(join(*child))
        else:
            parts.append(escape(child))
    return Html("".join(parts))


def el(name: str, /, *children: object, **attributes: object) -> Html:
    """`<name ...>children</name>`. `class_` and `for_` lose the underline, other underlines become dashes.

    An attribute of None or False is left out, one of True stands without a value.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(value)}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if name in VOID else f"{opening}{join(*children)}</{name}>")


def url(*segments: object, query: Mapping[str, object] | None = None) -> str:
    """A path of this server. Segments are quoted whole, so that a slash in an id stays in its segment."""
    path = "/" + "/".join(quote(str(s).encode("utf-8", "replace").decode(), safe="") for s in segments)
    kept = {k: str(v) for k, v in (query or {}).items() if v not in (None, "")}
    return f"{path}?{urlencode(kept, errors='replace')}" if kept else path


def number(value: object, digits: int = 3) -> str:
    """A number for people: `0.469`, `12`, `-`; what is not a number is shown as it is."""
    if value is None:
        return "\u2013"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:.{digits}f}" if abs(value) >= 10**-digits or value == 0 else f"{value:.2e}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def seconds(value: object) -> str:
    """`0.42 s`, `12.3 s`, `3 min 05 s`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return number(value)
    if value < 0.001:
        return "0 s"
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def size(num_bytes: int) -> str:
    """`512 B`, `3.2 KiB`, `1.9 GiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
