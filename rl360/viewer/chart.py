"""Small line charts as SVG, drawn here: no script, no library.

In: numbers by iteration. Out: markup. A curve of more points than pixels shows the mean of each pixel's points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl360.viewer.html import Html, el, number

WIDTH, HEIGHT = 560, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 12, 22
MAX_POINTS = 250


def line_chart(title: str, series: Mapping[str, Mapping[int, float | None]], top: float | None = None) -> Html | None:
    """Up to three series over iterations on one scale, which reaches to `top` at least; None when there is no number to
    show."""
    points = {
        name: [(i, float(v)) for i, v in sorted(values.items()) if isinstance(v, int | float)]
        for name, values in series.items()
    }
    points = {name: values for name, values in points.items() if values}
    if not points:
        return None
    everything = [p for values in points.values() for p in values]
    low_x, high_x = min(i for i, _ in everything), max(i for i, _ in everything)
    low_y, high_y = min(0.0, *(v for _, v in everything)), max(v for _, v in everything)
    high_y = high_y if top is None else max(high_y, top)
    high_y = high_y if high_y > low_y else low_y + 1.0

    def x(iteration: float) -> float:
        span = high_x - low_x
        share = (iteration - low_x) / span if span else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high_y - value) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts: list[object] = []
    for share in (0.0, 0.5, 1.0):
        value = low_y + share * (high_y - low_y)
        at = round(y(value), 1)
        parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(el("text", number(value, 2), x=LEFT - 6, y=at + 4, text_anchor="end"))
    parts.append(el("text", low_x, x=x(low_x), y=HEIGHT - 6, text_anchor="middle"))
    if high_x > low_x:
        parts.append(el("text", high_x, x=x(high_x), y=HEIGHT - 6, text_anchor="end"))
    for index, (name, values) in enumerate(points.items()):
        thinned = _thinned(values)
        path = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in thinned)
        parts.append(el("polyline", points=path, class_=f"curve c{index}"))
        if len(thinned) <= MAX_POINTS // 4:
            parts += [
                el(
                    "circle",
                    el("title", f"{name}, iteration {i:g}: {number(v)}"),
                    cx=round(x(i), 1),
                    cy=round(y(v), 1),
                    r=3,
                    class_=f"dot c{index}",
                )
                for i, v in thinned
            ]
    legend = [el("span", name, class_=f"key c{index}") for index, name in enumerate(points)]
    drawing = el("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    return el("figure", el("figcaption", el("b", title), *legend), drawing, class_="chart")


def _thinned(values: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS: means of runs of neighbours."""
    if len(values) <= MAX_POINTS:
        return [(float(i), v) for i, v in values]
    step = -(-len(values) // MAX_POINTS)
    parts = [values[at : at + step] for at in range(0, len(values), step)]
    return [(sum(i for i, _ in part) / len(part), sum(v for _, v in part) / len(part)) for part in parts]


def bar(parts: Sequence[tuple[str, float]], total: float) -> Html | None:
    """A horizontal bar of the parts of a whole; what they leave of `total` stays empty."""
    if total <= 0:
        return None
    drawn: list[object] = []
    at = 0.0
    for index, (name, value) in enumerate(parts):
        width = max(0.0, value) / total * 100
        if width > 0:
            label = el("title", f"{name}: {number(value)} s")
            drawn.append(
                el("rect", label, x=round(at, 3), y=0, width=round(width, 3), height=10, class_=f"part c{index}")
            )
        at += width
    return el("svg", *drawn, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", role="img")
