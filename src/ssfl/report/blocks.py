"""What reports are made of: plain dicts that page.js draws in a browser and figures.py with matplotlib.

A section is {id, title, blocks}. A block's "kind" says what it is: text, say, tiles, heading, line, matrix,
bars, table, images, views or pre. A block with a "figure" is a figure of that name.
"""

from collections.abc import Sequence
from typing import Any

Block = dict[str, Any]
Cell = str | Block


def text(told: str, look: str = "") -> Block:
    """A paragraph; it may look like "lead" or "note"."""
    return {"kind": "text", "text": told, "look": look}


def heading(told: str) -> Block:
    return {"kind": "heading", "text": told}


def say(head: str, told: str, bad: bool) -> Block:
    """What a reader should not miss."""
    return {"kind": "say", "head": head, "text": told, "bad": bad}


def number(told: str) -> Block:
    """A cell that stands to the right."""
    return {"text": told, "number": True}


def table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> Block:
    return {"kind": "table", "head": list(head), "rows": [list(row) for row in rows]}


def half(block: Block) -> Block:
    """A block that takes half of a wide page; the next one stands beside it."""
    return {**block, "half": True}


def bars(figure: str, title: str, items: list[Block], form: str, note: str = "") -> Block:
    """Level bars of {name, value}."""
    return {"kind": "bars", "figure": figure, "title": title, "items": items, "format": form, "note": note}


def named(blocks: Sequence[Block], prefix: str) -> list[Block]:
    """The blocks, with a prefix to the names of their figures."""
    return [{**block, "figure": prefix + block["figure"]} if "figure" in block else block for block in blocks]
