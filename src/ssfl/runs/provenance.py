"""Finds out which commit of the code produced a result."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def commit() -> str | None:
    """Returns the git commit of this checkout, followed by "+" if the code has uncommitted changes; None if
    this is not a git checkout.

    If the environment variable SSFL_COMMIT is set, its value is returned instead. It is meant for copies
    without git history.
    """
    if recorded := os.environ.get("SSFL_COMMIT"):
        return recorded
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
