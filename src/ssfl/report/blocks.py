"""The blocks of a report: plain dicts, each describing one paragraph, chart or table. page.js draws them in a
browser, and figures.py draws them with matplotlib.

A section is {id, title, blocks}. A block's "kind" is one of: text, say, tiles, heading, line, matrix, bars,
table, images, views or pre. A block with the key "figure" is also saved as a figure file of that name.
"""

from collections.abc import Sequence
from typing import Any

Block = dict[str, Any]
Cell = str | Block


def text(content: str, look: str = "") -> Block:
    """Returns a paragraph. `look` is its style: "" (normal), "lead" (large) or "note" (small)."""
    return {"kind": "text", "text": content, "look": look}


def heading(content: str) -> Block:
    """Returns a heading inside a section."""
    return {"kind": "heading", "text": content}


def say(head: str, content: str, bad: bool) -> Block:
    """Returns a message in a highlighted box: a bold beginning (`head`) and a text. With `bad`, the box is a
    warning."""
    return {"kind": "say", "head": head, "text": content, "bad": bad}


def number(content: str) -> Block:
    """Returns a cell of a table whose text is right-aligned, as for numbers."""
    return {"text": content, "number": True}


def table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> Block:
    """Returns a table with these headings and rows."""
    return {"kind": "table", "head": list(head), "rows": [list(row) for row in rows]}


def half(block: Block) -> Block:
    """Returns a copy of the block that takes only half the width of a wide page. Two such blocks in a row
    stand side by side."""
    return {**block, "half": True}


def bars(figure: str, title: str, items: list[Block], form: str, note: str = "") -> Block:
    """Returns a chart with one horizontal bar for each item {name, value}. `figure` is the file name under
    which the chart is also saved. `form` is the number format: "percent", "seconds" or "count". `note` is a
    text below the chart."""
    return {"kind": "bars", "figure": figure, "title": title, "items": items, "format": form, "note": note}


def named(blocks: Sequence[Block], prefix: str) -> list[Block]:
    """Returns the blocks with `prefix` before the file names of their figures, so that the figures of several
    runs have different names."""
    return [{**block, "figure": prefix + block["figure"]} if "figure" in block else block for block in blocks]
