"""What `ssfl run` and `ssfl resume` share: carry a run out with a progress display, print its result."""

import json
import shlex
import sys
from typing import Any


def carry_out(start: Any, quiet: bool, json_only: bool) -> None:
    """Run with or without a progress display, then tell the result."""
    from ssfl.engines import dist
    from ssfl.report import collapse, gather
    from ssfl.runs import folder as runs
    from ssfl.runs import progress

    follower = dist.ranks() > 1 and dist.rank() > 0  # one of torchrun's processes speaks for all
    result = progress.watched(start, quiet or follower)
    if follower:
        return
    if json_only:
        print(json.dumps(runs.read_summary(result.path)))
    elif not quiet:
        print(f"{result.told}  in {result.path}")
        if result.verdict is not None:
            print(result.verdict)
        said = collapse.judge(gather.read(result.path, result.path.name))
        if said.bad:
            print(
                f"{said.head} {said.text} See `ssfl report {shlex.quote(str(result.path))}`", file=sys.stderr
            )
