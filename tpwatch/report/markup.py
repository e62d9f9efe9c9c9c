"""HTML from values: whatever is not markup already is escaped, so that forgetting to do it is impossible.

Knows HTML's syntax, not what is written in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

from tpwatch.errors import printable
from tpwatch.export.jsonl import encode


class Html(str):
    """A piece of HTML: text that needs no escaping any more."""

    __slots__ = ()


Child: TypeAlias = str | Iterable["Child"]
"""What may stand inside an element: HTML, text (which is escaped), or any nesting of them."""

Attribute: TypeAlias = str | float | bool | None

VOID = frozenset({"br", "input", "link", "meta", "wbr"})
"""Elements that have no content and no end tag."""


def el(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """One element. `class_` is written `class`, `stroke_width` `stroke-width`.

    An attribute that is None or False is left out; True stands alone.
    """
    start = f"<{tag}{''.join(_attribute(*pair) for pair in attributes.items())}>"
    return Html(start if tag in VOID else f"{start}{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """Several pieces one after another."""
    return Html("".join(_flat(children)))


def dotted(name: str) -> Html:
    """A dotted name that may be broken behind each dot, its last part but `weight` or `bias` stressed."""
    parts = name.split(".")
    at = len(parts) - 2 if parts[-1] in {"weight", "bias"} and len(parts) > 1 else len(parts) - 1
    pieces: list[Child] = []
    for index, part in enumerate(parts):
        pieces += [el("b", part) if index == at else part]
        pieces += [".", el("wbr")] if index < len(parts) - 1 else []
    return el("code", pieces)


def data_block(identifier: str, value: object) -> Html:
    """JSON in a script element that nothing in a string of it can close or comment out."""
    text = encode(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json" id="{escape(identifier)}">{text}</script>')


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f' {name}="{escape(printable(text))}"'


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str):
            yield escape(printable(child))
        else:
            yield from _flat(child)
