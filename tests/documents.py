"""What README and docs/ tell a person to type: the commands, and those that a test cannot run."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run(?: \((.+?)\))?: (.+?) -->\n\Z")
"""In front of a block: the commands in brackets, told by how they begin, or all of it, and why."""
INLINE = re.compile(r"(?<!`)`(ssfl [^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """A line of a console block, or a whole block of Python."""

    page: str
    line: int
    text: str
    python: bool = False
    not_run: str = ""
    """Why a test cannot run it."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text.splitlines()[0]}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands(page: Path) -> list[Command]:
    """In the order of the page."""
    text, name = page.read_text("utf-8"), page.relative_to(ROOT).as_posix()
    found = []
    for block in FENCE.finditer(text):
        if block[1] not in ("console", "python"):
            continue
        first = text.count("\n", 0, block.start()) + 2
        mark = MARK.search(text[: block.start()])
        if block[1] == "python":
            found.append(Command(name, first, block[2], True, mark[2] if mark else ""))
            continue
        some = [begin.strip() for begin in (mark[1] or "").split(";")] if mark else []
        lines = [(first + n, line) for n, line in enumerate(block[2].splitlines()) if line.strip()]
        for begin in some:
            assert any(line.startswith(begin) for _, line in lines), f"{name}: no line begins with {begin!r}"
        for number, line in lines:
            marked = mark is not None and line.startswith(tuple(some))
            found.append(Command(name, number, line, not_run=mark[2] if mark and marked else ""))
    return found


def mentioned(page: Path) -> list[Command]:
    """Commands that stand in a sentence."""
    text, name = page.read_text("utf-8"), page.relative_to(ROOT).as_posix()
    plain = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    return [
        Command(name, plain.count("\n", 0, found.start()) + 1, found[1].replace("\n", " "))
        for found in INLINE.finditer(plain)
    ]
