"""The augmentations that the setting data.views selects."""

from ssfl.data.augment import STRONG, WEAK, View
from ssfl.data.gentle import GENTLE
from ssfl.data.semifl_views import SEMIFL

KINDS = {"standard": (WEAK, STRONG), "gentle": (GENTLE, GENTLE), "semifl": (WEAK, SEMIFL)}
"""For each value of the setting data.views, the weak and the strong augmentation that it selects."""


def kind_of(weak: View, strong: View) -> str | None:
    """Returns the value of the setting data.views, such as "standard", that selects this pair of
    augmentations. Returns None if the user has defined one or both of them."""
    return next((name for name, pair in KINDS.items() if pair == (weak, strong)), None)
