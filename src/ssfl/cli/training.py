"""What `ssfl run` and `ssfl resume` have in common: they train with a progress display, then print the
result."""

import json
import shlex
import sys
from typing import Any


def carry_out(start: Any, quiet: bool, json_only: bool) -> None:
    """Calls `start`, which trains and returns a result, and prints the result. `start` gets a function that
    shows the progress. `quiet` hides the progress and the result. `json_only` prints the content of
    summary.json instead of the result, even with `quiet`."""
    from ssfl.engines import dist
    from ssfl.report import collapse, gather
    from ssfl.runs import display
    from ssfl.runs import folder as runs

    follower = dist.ranks() > 1 and dist.rank() > 0  # with torchrun, only the first process prints
    result = display.watched(start, quiet or follower)
    if follower:
        return
    if json_only:
        print(json.dumps(runs.read_summary(result.path)))
    elif not quiet:
        print(f"{result.score_text}  in {result.path}")
        if result.verdict is not None:
            print(result.verdict)
        diagnosis = collapse.judge(gather.read(result.path, result.path.name))
        path = shlex.quote(str(result.path))
        if diagnosis.bad:
            print(f"{diagnosis.head} {diagnosis.text} See `ssfl report {path}`", file=sys.stderr)
        elif sys.stderr.isatty():  # for a person, not for a log
            print(f"next: `ssfl report {path}` or `ssfl predict {path} IMAGE`", file=sys.stderr)
