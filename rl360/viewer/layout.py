"""What every page has: the frame, navigation, and small marks for outcomes, rewards and tags.

In: parts made by the pages. Out: a whole document. No inline style or script: the server's content policy forbids
both, so that markup which got through by mistake could still do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl360.viewer.html import Html, el, join, number, url
from rl360.viewer.source import Line

# Colour classes of viewer.css. What a run may say beyond these gets none.
KIND_TONES = {
    "trained": "good",
    "evaluated": "info",
    "filtered": "dim",
    "stale": "dim",
    "unused": "dim",
    "masked": "warn",
    "requeued": "warn",
    "open": "info",
}
STATE_TONES = {"running": "info", "finished": "good", "failed": "bad"}
KEYS = (
    ("n \u2192", "next"),
    ("p \u2190", "previous"),
    ("u", "up"),
    ("m", "colour tokens by mask or by logprob"),
    ("/", "to the filter"),
    ("?", "these keys"),
)


def document(
    title: str,
    run_name: str,
    state: str,
    crumbs: Sequence[tuple[str, str | None]],
    body: object,
    *,
    stamp: str = "",
    links: Mapping[str, tuple[str, str] | None] | None = None,
) -> Html:
    """A page.

    Args:
        crumbs: (text, address) from the run down; the last one is this page.
        stamp: what the page's data was made from; the page is fetched again when the server's differs. "": never.
        links: "prev", "next", "up" -> (address, title); keys follow them.
    """
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title} \u00b7 {run_name}"),
        el("link", rel="stylesheet", href="/static/viewer.css"),
        el("link", rel="icon", href="/static/icon.svg"),
        el("script", src="/static/viewer.js", defer=True),
    )
    trail: list[object] = []
    for text, address in crumbs:
        trail.append(el("span", "/", class_="sep"))
        trail.append(el("a", text, href=address) if address else el("b", text))
    named = {"prev": "\u2190 previous", "up": "up", "next": "next \u2192"}
    arrows = [
        el("a", text, rel=rel, href=links[rel][0], title=links[rel][1])  # type: ignore[index]
        if links.get(rel)
        else el("span", text, class_="off")
        for rel, text in named.items()
        if links is not None
    ]
    top = el(
        "header",
        el("nav", el("a", run_name, href="/", class_="home"), mark(state, STATE_TONES.get(state, "warn")), *trail),
        el("nav", *arrows, el("button", "?", type="button", id="keys-button", title="keys"), class_="arrows"),
    )
    keys = el(
        "dialog",
        el("h2", "Keys"),
        el("dl", *[(el("dt", key), el("dd", what)) for key, what in KEYS]),
        el("form", el("button", "Close"), method="dialog"),
        id="keys",
    )
    page = el("body", top, el("main", body, id="main"), keys, data_stamp=stamp or None)
    return Html(f"<!doctype html>{el('html', head, page, lang='en')}")


def mark(text: object, tone: str = "", title: object = None) -> Html:
    """A short word on a coloured ground."""
    return el("span", text, class_=f"mark {tone}".strip(), title=title)


def kind_mark(kind: str, reason: str | None = None) -> Html:
    return mark(kind if reason is None else f"{kind}: {reason}", KIND_TONES.get(kind, ""))


def tag_marks(tags: Sequence[str]) -> Html:
    return join(*[mark(tag, "tag") for tag in tags])


def reward_tone(line: Line) -> str:
    """By success where there is a verdict, else by the reward's sign; undecided and masked ones apart."""
    if line.reward is None:
        return "none"
    if line.success is not None:
        return "good" if line.success else "bad"
    return "good" if line.reward > 0 else "bad"


def chip(line: Line, query: Mapping[str, object], *, here: bool = False) -> Html:
    """An attempt in one small box, linked: its reward on the colour of its success."""
    said = [line.try_id, line.kind, line.reason, line.stop, line.cause, f"reward {number(line.reward)}"]
    text = number(line.reward, 2) if line.reward is not None else ("\u2026" if line.kind == "open" else "\u00d7")
    return el(
        "a",
        text,
        class_=f"chip {reward_tone(line)} kind-{line.kind if line.kind in KIND_TONES else 'other'}"
        + (" here" if here else ""),
        href=attempt_url(line.iteration, line.try_id, query),
        title=" \u00b7 ".join(str(part) for part in said if part),
    )


def attempt_url(iteration: int, try_id: str, query: Mapping[str, object] | None = None) -> str:
    return url("attempt", iteration, try_id, query=query)


def table(headings: Sequence[object], rows: Sequence[Sequence[object]], *, class_: str | None = None) -> Html:
    """A table; a heading that begins with `#` is of numbers, aligned to the right."""
    is_number = [str(h).startswith("#") for h in headings]
    head = [
        el("th", str(h).removeprefix("#"), class_="num" if n else None)
        for h, n in zip(headings, is_number, strict=True)
    ]
    body = [
        el("tr", *[el("td", cell, class_="num" if n else None) for cell, n in zip(row, is_number, strict=True)])
        for row in rows
    ]
    whole = el("table", el("thead", el("tr", *head)), el("tbody", *body), class_=class_)
    return el("div", whole, class_="scroll")


def section(title: object, *children: object, id_: str | None = None, aside: object = None) -> Html:
    return el("section", el("h2", title, el("span", aside, class_="aside") if aside else None), *children, id=id_)


def facts(pairs: Sequence[tuple[str, object]]) -> Html:
    """Names and values in one row of boxes."""
    return el("dl", *[el("div", el("dt", name), el("dd", value)) for name, value in pairs], class_="facts")
