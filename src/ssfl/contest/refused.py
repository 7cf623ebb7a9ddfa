"""Settings that a contest sets itself, and why. This module does not import torch, which takes seconds."""

REFUSED = {
    "run.seed": "the seeds of a contest are 1, 2, ...; set their number with --seeds",
    "run.test": "a contest uses test images only in the last round; leave this setting out",
    "run.folds": "a contest compares methods on held-out test images, so it does not cross-validate; leave "
    "this setting out, or set it to 0",
}
"""Why a setting cannot be changed, and what to do instead, by `section.key`."""
