"""An example of another default: `anchored` as the preset `pictures` uses it, for contests.

    ssfl contest pictures --methods anchored,examples/own/relative.py:Relative --set data.path=FILE.npz

A contest ignores the config's section [method], so there `anchored` has an absolute threshold. This class has
the preset's relative one.
"""

from dataclasses import dataclass

import ssfl
from ssfl.methods.anchored import Anchored


@dataclass(frozen=True)
class Relative(Anchored):
    """`anchored` with a relative threshold, as in the preset `pictures`."""

    threshold: float = ssfl.setting(0.95, least=0, most=1, what="a share of the mean confidence")
    """τ: an image gets a pseudo-label if the confidence of the received model is at least this share of the
    mean confidence on the server's labelled images."""
    relative: bool = True
    """Whether the threshold is relative."""
