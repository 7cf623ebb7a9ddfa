"""An example of your own method: AdaMatch (Berthelot et al. 2022), written with public names only.

    ssfl run --set method.name=examples/own/adamatch.py:AdaMatch
    ssfl contest --methods alternate,examples/own/adamatch.py:AdaMatch --seeds 3

AdaMatch has two ideas. First, the threshold is relative: a share of the mean confidence on labelled images.
So it rises while the model learns. Second, pseudo-labels are aligned: predictions are divided by their mean
over unlabelled images and multiplied by that over labelled ones. So no class takes over.

What differs here: users hold no labelled images, so both means are over a user's own images in a round.
Alignment divides by the mean to the power `align`, which moves the labels towards equally frequent classes.
With a power of 1, a user that holds one class would lose it. Labels are made once a round, and AdaMatch's
interpolation of logits is left out. The defaults of both fields were not tuned.
"""

from dataclasses import dataclass
from typing import ClassVar

import ssfl


@dataclass(frozen=True)
class AdaMatch(ssfl.Method):
    """Users make pseudo-labels once a round, relative to their mean confidence; the server trains last."""

    share: float = ssfl.setting(0.9, least=0, most=1, what="a share of the mean confidence")
    """An image gets a pseudo-label when its confidence is at least this share of the mean."""
    align: float = ssfl.setting(0.5, least=0, most=1, what="0 leaves predictions as they are")
    """How strongly predictions of frequent classes are reduced."""

    defaults: ClassVar = {"model": {"norm": "group"}}

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: ssfl.Look) -> ssfl.Labels:
        """Returns the pseudo-labels of the round's images, from predictions [n, images, classes]."""
        threshold = self.share * look.probabilities.amax(-1).mean(1, keepdim=True)
        aligned = look.probabilities / look.probabilities.mean(1, keepdim=True).clamp(min=1e-6) ** self.align
        aligned = aligned / aligned.sum(-1, keepdim=True)
        confident = aligned.amax(-1) >= threshold
        return ssfl.parts.labelled(look._replace(probabilities=aligned), confident)

    def user_loss(self, step: ssfl.Step) -> ssfl.Losses:
        """Returns the cross-entropy of strong views with these pseudo-labels."""
        return ssfl.parts.round_labels(step)

    def round(self, state: ssfl.State, fed: ssfl.Fed) -> ssfl.State:
        """Returns the state after a round: the users' mean replaces the model, and the server then
        trains it."""
        return ssfl.parts.server_last(state, fed, fed.train_users(state.streams))
