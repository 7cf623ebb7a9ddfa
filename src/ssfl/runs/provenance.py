"""The commit of the code that produced a result."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def commit() -> str | None:
    """Returns the commit of this checkout, with a plus sign if the code was changed; None outside a checkout.

    For a copy without history, the environment variable SSFL_COMMIT can name the commit.
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
