"""`ssfl split`: show which images the server and each user get."""

import json

from ssfl.cli import verbs
from ssfl.cli.options import ConfigName, Json
from ssfl.runs.text import printable


def split(
    config: ConfigName = None, sets: verbs.Sets = None, code: verbs.With = None, json_only: Json = False
) -> None:
    """Show which images the server and each user get.

    Example: ssfl split --set split.skew=1"""
    from ssfl.config.loading import check_early
    from ssfl.core import outside, progress

    outside.supply(code or [])
    check_early(config, sets or [])  # before torch is imported
    progress.show(not json_only)
    from ssfl.data.inventory import describe_split
    from ssfl.runs import text
    from ssfl.runs.choose import load_config
    from ssfl.runs.resolve import load_data, make_parts, resolve

    loaded = load_config(config, sets or [])
    dataset = load_data(loaded)
    resolved = resolve(loaded, dataset)
    described = describe_split(dataset, *make_parts(resolved, dataset))
    lines = text.split(resolved, described).splitlines()
    print(json.dumps(described) if json_only else "\n".join(map(printable, lines)))
