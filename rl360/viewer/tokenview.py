"""The tokens of an attempt as a page shows them: coloured by mask and by logprob, with their weight versions.

In: segments of a trajectory row. Out: markup. Both colours are classes of each token, and the box around them says
which one counts; viewer.js switches it, and so does the address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl360.viewer.html import Html, el, join, number
from rl360.viewer.layout import section, table
from rl360.viewer.tokens import LOGPROB_EDGES, Token, TokenTexts, logprob_level, segment_tokens

TOKENS_A_PAGE = 4096
COLOURS = ("logprob", "mask")


def segments_view(
    segments: Sequence[Mapping[str, Any]],
    texts: TokenTexts,
    view: Mapping[str, int | str],
    link: Callable[..., str],
) -> Html:
    """One segment at a time, TOKENS_A_PAGE of its tokens from view["token"] on. `link(segment=, token=, colour=)` gives
    the address of another part."""
    if not segments:
        return section("Tokens", el("p", "No tokens.", class_="dim"), id_="tokens")
    index = min(max(0, int(view.get("segment", 0))), len(segments) - 1)
    segment = segments[index]
    length = len(segment["token_ids"])
    start = min(max(0, int(view.get("token", 0))), max(0, length - 1))
    colour = view.get("colour") if view.get("colour") in COLOURS else COLOURS[0]
    tokens = segment_tokens(segment, texts, start, min(length, start + TOKENS_A_PAGE))
    switch = [el("a", f"by {name}", href=link(colour=name), class_="switch", data_colour=name) for name in COLOURS]
    sampled = sum(stop - first for first, stop in segment["sampled"])
    note = el("p", f"Token ids are shown: {texts.problem}.", class_="dim") if texts.problem else None
    return section(
        "Tokens",
        _segment_choice(segments, index, link),
        note,
        _pages(length, start, index, link),
        el(
            "div",
            el("p", *switch, *_legend(), class_="legend-line"),
            el("div", *_drawn(tokens), class_="tokens"),
            class_=f"by-{colour}",
            id="token-box",
        ),
        _pages(length, start, index, link),
        _spans(segment),
        id_="tokens",
        aside=f"{number(sampled)} sampled of {number(length)}",
    )


def _legend() -> list[Html]:
    bounds = [1.0, *[math.exp(edge) for edge in LOGPROB_EDGES]]
    keys = [
        el("span", f"{bound:.2f}", class_=f"t s l{level}", title=f"probability up to {bound:.2f}")
        for level, bound in enumerate(bounds)
    ]
    return [
        el("span", "probability up to ", *keys, class_="legend-logprob"),
        el(
            "span",
            el("span", "sampled: trained on", class_="t s"),
            " ",
            el("span", "context: prompt, tools", class_="t"),
            class_="legend-mask",
        ),
    ]


def _drawn(tokens: Sequence[Token]) -> list[Html]:
    parts: list[Html] = []
    version: int | None = None
    for token in tokens:
        if token.version is not None and token.version != version:
            version = token.version
            parts.append(el("span", f"v{version}", class_="version", title=f"sampled under weight version {version}"))
        parts.append(_token(token))
    return parts


def _token(token: Token) -> Html:
    told = f"{token.position} \u00b7 id {token.token_id}"
    class_ = "t"
    if token.logprob is not None:
        class_ = f"t s l{logprob_level(token.logprob)}"
        probability = math.exp(min(0.0, token.logprob))
        told += f" \u00b7 logprob {token.logprob:.4f} \u00b7 p {probability:.3f} \u00b7 v{token.version}"
    if token.text is None:
        return join(el("span", token.token_id, class_=class_, title=told), " ")
    if token.text == "":  # a part of a character that the next token ends
        return el("span", "\u00b7", class_=f"{class_} part", title=told)
    return el("span", token.text.replace("\n", "\u21b5\n"), class_=class_, title=told)


def _segment_choice(segments: Sequence[Mapping[str, Any]], index: int, link: Callable[..., str]) -> Html | None:
    if len(segments) < 2:
        return None
    rows = [
        [
            el("a", f"segment {i}", href=link(segment=i, token=0), class_="here" if i == index else None),
            number(len(one["token_ids"])),
            number(sum(stop - start for start, stop in one["sampled"])),
            "" if one["parent"] is None else f"segment {one['parent']}",
            one["fork_reason"] or "",
        ]
        for i, one in enumerate(segments)
    ]
    return table(["", "#tokens", "#sampled", "goes on from", "why it began"], rows)


def _pages(length: int, start: int, index: int, link: Callable[..., str]) -> Html | None:
    if length <= TOKENS_A_PAGE:
        return None
    parts = [
        el("a", f"{at:,}", href=link(segment=index, token=at), class_="gap here" if at == start else "gap")
        for at in range(0, length, TOKENS_A_PAGE)
    ]
    return el("p", "from token ", *parts, class_="pager")


def _spans(segment: Mapping[str, Any]) -> Html | None:
    spans = segment["version_spans"]
    if not spans:
        return None
    text = ", ".join(f"v{version}: tokens {start:,}\u2013{end - 1:,}" for version, start, end in spans[:50])
    more = f" and {len(spans) - 50} more" if len(spans) > 50 else ""
    return el("p", f"Weight versions: {text}{more}", class_="dim")
