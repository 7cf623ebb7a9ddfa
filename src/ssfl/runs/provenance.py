"""Which code gave a number."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def commit() -> str | None:
    """The commit of this checkout, with a plus where the code differs from it; None outside of one.

    A copy without its history can be told through the environment: SSFL_COMMIT.
    """
    if told := os.environ.get("SSFL_COMMIT"):
        return told
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    changed = _output([*git, "status", "--porcelain", "--", "src", "benchmarks", "examples"])
    return _output([*git, "rev-parse", "HEAD"]) + ("+" if changed else "") or None


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
