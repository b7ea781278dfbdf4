"""Markup is made by `el` alone, and text stays text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from rl360.viewer.html import Html, el, escape, join, number, seconds, size, url, visible


class Reader(HTMLParser):
    """Collects what a browser would take for tags and for text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@given(st.text(), st.text())
def test_any_text_stays_text_in_elements_and_attributes(text, attribute):
    found = read(el("div", text, title=attribute))
    assert found.tags == [("div", [("title", visible(attribute))])]
    assert found.text == visible(text)


@given(st.text(alphabet=st.characters()))
def test_every_text_can_be_sent(text):
    escape(text).encode("utf-8")  # lone surrogates too


def test_children_none_lists_numbers_and_markup():
    inner = el("b", "<")
    assert inner == "<b>&lt;</b>"
    assert join("a<", None, [1, [0.5, inner]]) == "a&lt;10.5<b>&lt;</b>"
    assert el("br") == "<br>"
    assert el("input", class_="x", disabled=True, value=None, checked=False, data_of=3) == (
        '<input class="x" disabled data-of="3">'
    )
    assert isinstance(join(), Html)


def test_what_cannot_be_seen_is_shown():
    assert visible("a\x00\x1b\x7f\n\tb") == "a\u2400\u241b\u2421\n\tb"
    assert visible("\u202eexe.txt") == "\u27e8U+202E\u27e9exe.txt"
    assert visible("\ud800") == "\u27e8U+D800\u27e9"


def test_addresses_keep_an_id_in_its_segment():
    assert url("attempt", 3, "a/../b?c#d%") == "/attempt/3/a%2F..%2Fb%3Fc%23d%25"
    assert url(query={"page": 0, "tag": "a&b", "task": "", "kind": None}) == "/?page=0&tag=a%26b"
    assert url("x", "\ud800") == "/x/%3F"


def test_numbers_for_people():
    assert [number(v) for v in (None, 0.46875, 1.0, 0.0, 12345, True, "x", 2e-5)] == [
        "\u2013",
        "0.469",
        "1",
        "0",
        "12,345",
        "True",
        "x",
        "2.00e-05",
    ]
    assert number(float("nan")) == "nan"
    assert [seconds(v) for v in (0.0, 0.254, 31.27, 125, None)] == ["0 s", "0.25 s", "31.3 s", "2 min 05 s", "\u2013"]
    assert [size(v) for v in (0, 1023, 2048, 5 << 30)] == ["0 B", "1023 B", "2.0 KiB", "5.0 GiB"]
