"""The blocks of a report: plain dicts that page.js draws in a browser, and figures.py draws with matplotlib.

A section is {id, title, blocks}. A block's "kind" says what it is: text, say, tiles, heading, line, matrix,
bars, table, images, views or pre. A block with the key "figure" is also saved as a figure of that name.
"""

from collections.abc import Sequence
from typing import Any

Block = dict[str, Any]
Cell = str | Block


def text(content: str, look: str = "") -> Block:
    """Returns a paragraph; `look` may be "lead" or "note"."""
    return {"kind": "text", "text": content, "look": look}


def heading(content: str) -> Block:
    return {"kind": "heading", "text": content}


def say(head: str, content: str, bad: bool) -> Block:
    """Returns a message that is highlighted on the page."""
    return {"kind": "say", "head": head, "text": content, "bad": bad}


def number(content: str) -> Block:
    """Returns a right-aligned cell of a table."""
    return {"text": content, "number": True}


def table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> Block:
    return {"kind": "table", "head": list(head), "rows": [list(row) for row in rows]}


def half(block: Block) -> Block:
    """Returns a block that takes half the width of a wide page, beside the next block."""
    return {**block, "half": True}


def bars(figure: str, title: str, items: list[Block], form: str, note: str = "") -> Block:
    """Returns a chart with a horizontal bar for each item {name, value}. `form` is the number format."""
    return {"kind": "bars", "figure": figure, "title": title, "items": items, "format": form, "note": note}


def named(blocks: Sequence[Block], prefix: str) -> list[Block]:
    """Returns the blocks, with a prefix before the names of their figures."""
    return [{**block, "figure": prefix + block["figure"]} if "figure" in block else block for block in blocks]
