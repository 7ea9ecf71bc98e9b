"""HTML and SVG as trees of the standard library's elements, which escape whatever text is put into them.

The pictures of a report are lines and bars. A plotting library would put megabytes of script into every file, or bake
in colours that cannot follow the reader's light or dark setting; both cost more than the two charts of
:mod:`draftsmith.report.charts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

__all__ = ["COLOURS", "Child", "add", "el", "page", "section", "table"]

Child = Element | str | None

#: Number of colours that series go through (classes ``s0``, ``s1``, …).
COLOURS = 8

_STYLE = (
    """
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--soft:#59636e;--line:#d5dae0;--panel:#f5f7f9;
--c0:#0b62c4;--c1:#c2410c;--c2:#15803d;--c3:#9333ea;--c4:#b91c1c;--c5:#0e7490;--c6:#a16207;--c7:#be185d;
--accepted:#d3f0dc;--rejected:#ffd9d6;--bonus:#d6e6ff}
@media (prefers-color-scheme:dark){:root{--back:#12161b;--text:#e6eaef;--soft:#9aa5b1;--line:#333b45;--panel:#1b2128;
--c0:#6cb2ff;--c1:#ff9a5c;--c2:#5fd38d;--c3:#c79bff;--c4:#ff8d85;--c5:#5fd0e4;--c6:#e3bb55;--c7:#ff8cc0;
--accepted:#1d4a30;--rejected:#5c2320;--bonus:#1d3c68}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:60rem;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin:2.2rem 0 .5rem;border-bottom:1px solid var(--line)}h3{font-size:1rem}
p.note,figcaption,.soft{color:var(--soft);font-size:.875rem}figcaption{font-size:.8125rem}
figure{margin:1rem 0}svg{display:block;width:100%;max-width:30rem;height:auto}
@media (min-width:60rem){figure{display:inline-block;vertical-align:top;width:29rem;padding-right:1rem}}
svg text{fill:var(--soft);font-size:11px}svg .axis{stroke:var(--line);stroke-width:1}
svg .curve{fill:none;stroke-width:1.8;stroke-linejoin:round}svg .whisker{stroke:var(--text);stroke-width:1.2}
.scroll{overflow-x:auto}table{border-collapse:separate;border-spacing:0;font-size:.875rem}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{white-space:normal;overflow-wrap:break-word;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:7rem;position:sticky;left:0;
background:var(--back)}
ul.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.875rem}
ul.legend svg{display:inline-block;width:1.6rem;height:.7rem;margin-right:.4rem}
pre{background:var(--panel);padding:.7rem;white-space:pre-wrap;font-size:.8125rem}
.answer{background:var(--panel);padding:.7rem;white-space:pre-wrap;font:.8125rem/1.7 ui-monospace,monospace}
.accepted,.rejected,.bonus{border-radius:3px;color:var(--text)}.accepted{background:var(--accepted)}.bonus{background:var(--bonus)}
.rejected{background:var(--rejected);text-decoration:line-through}
"""
    + "".join(f".s{n}{{--c:var(--c{n})}}" for n in range(COLOURS))
    + "svg .curve,svg .dot{stroke:var(--c)}svg .bar,svg .dot{fill:var(--c)}"
)


def el(tag: str, *children: Child, **attributes: object) -> Element:
    """An element. Attribute names end in ``_`` where they are Python's words, and have ``-`` for ``_``; None: none."""
    element = Element(
        tag,
        {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items() if value is not None},
    )
    add(element, children)
    return element


def add(element: Element, children: Iterable[Child]) -> None:
    """Append elements and texts; None is left out."""
    for child in children:
        if isinstance(child, str):
            if len(element):
                element[-1].tail = (element[-1].tail or "") + child
            else:
                element.text = (element.text or "") + child
        elif child is not None:
            element.append(child)


def section(title: str, *children: Child) -> Element:
    return el("section", el("h2", title), *children)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Element:
    """A table that scrolls by itself where the page is narrower."""
    head = el("thead", el("tr", *(el("th", name) for name in header)))
    body = el("tbody", *(el("tr", *(el("td", cell) for cell in row)) for row in rows))
    return el("div", el("table", head, body), class_="scroll")


def page(title: str, *children: Child) -> str:
    """The whole file."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # The address of an icon that is none: browsers ask for one otherwise.
        el("link", rel="icon", href="data:,"),
        el("title", title),
        el("style", _STYLE),
    )
    whole = el("html", head, el("body", el("h1", title), *children), lang="en")
    return "<!DOCTYPE html>\n" + tostring(whole, encoding="unicode", method="html") + "\n"
