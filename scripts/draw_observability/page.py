"""The frame of pages that stand in for another program's: plain HTML, light, without a request to anybody."""

from __future__ import annotations

from html import escape

STYLE = """
* { box-sizing: border-box }
body { margin: 0; padding: 12px; background: #f4f5f5; color: #24292e; font: 13px/1.4 "Liberation Sans", sans-serif }
header { display: flex; justify-content: space-between; align-items: center; height: 36px; padding: 0 4px 12px }
header h1 { font-size: 18px; font-weight: 600; margin: 0 }
section { background: #fff; border: 1px solid #dcdee0; border-radius: 3px; padding: 8px 10px; overflow: hidden }
h2 { font-size: 13px; font-weight: 600; margin: 0 0 6px; color: #24292e }
svg { display: block }
svg text { font-size: 11px; fill: #5c636b }
svg path { fill: none; stroke-linejoin: round }
svg .grid { stroke: #e4e6e8 }
svg .line { stroke-width: 1.6 }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: 4px 8px; border-bottom: 1px solid #e4e6e8 }
th { color: #3d71d9; font-weight: 600 }
.legend { margin-top: 4px; font-size: 12px }
.legend td { padding: 0 4px; border: 0; line-height: 19px }
.legend .n { text-align: right }
.legend i { display: inline-block; width: 14px; height: 3px; margin: 0 7px 3px 0 }
"""


def page(title: str, beside: str, body: str, style: str = "") -> str:
    """A page with a title, what stands at the right of it (HTML), and a body (HTML)."""
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}{style}</style>"
    return f"<!doctype html>{head}<header><h1>{escape(title)}</h1><div>{beside}</div></header>{body}"
