"""An example of your own method: AdaMatch (Berthelot et al. 2022), written only with public names of ssfl.

    ssfl run --set method.name=examples/own/adamatch.py:AdaMatch
    ssfl contest --methods alternate,examples/own/adamatch.py:AdaMatch --seeds 3

AdaMatch has two ideas. First, the threshold is relative: it is a fraction of the mean confidence on labelled
images, so it rises while the model learns. Second, pseudo-labels are aligned: predictions are divided by
their mean over unlabelled images and multiplied by their mean over labelled images. So no class dominates.

This version differs in four points. Users have no labelled images, so both means are over a user's own images
in a round. Alignment divides by the mean to the power `align`, which moves the labels towards equally
frequent classes; with a power of 1, a user with only one class would lose it. Pseudo-labels are made once a
round. AdaMatch's interpolation of logits is left out. The defaults of both settings were not tuned.
"""

from dataclasses import dataclass
from typing import ClassVar

import ssfl


@dataclass(frozen=True)
class AdaMatch(ssfl.Method):
    """Users make pseudo-labels once a round, with a threshold relative to their mean confidence. The server
    trains after the users."""

    share: float = ssfl.setting(0.9, least=0, most=1, what="a share of the mean confidence")
    """An image gets a pseudo-label if its confidence is at least this fraction of the mean confidence."""
    align: float = ssfl.setting(0.5, least=0, most=1, what="0 leaves predictions as they are")
    """How strongly the probabilities of frequently predicted classes are reduced: 0 not at all, 1 fully."""

    defaults: ClassVar = {"model": {"norm": "group"}}

    def uses(self) -> tuple[str, ...]:
        return ("strong",)

    def label(self, look: ssfl.Look) -> ssfl.Labels:
        """Returns the pseudo-labels of a user's images for this round, made from the model's predictions [n,
        images, classes] for n users."""
        threshold = self.share * look.probabilities.amax(-1).mean(1, keepdim=True)
        aligned = look.probabilities / look.probabilities.mean(1, keepdim=True).clamp(min=1e-6) ** self.align
        aligned = aligned / aligned.sum(-1, keepdim=True)
        confident = aligned.amax(-1) >= threshold
        return ssfl.parts.labelled(look._replace(probabilities=aligned), confident)

    def user_loss(self, step: ssfl.Step) -> ssfl.Losses:
        """Returns the cross-entropy of the strong views with the pseudo-labels that `label` made."""
        return ssfl.parts.round_labels(step)

    def round(self, state: ssfl.State, fed: ssfl.Fed) -> ssfl.State:
        """Returns the state after a round: the mean of the users' models replaces the model, and the server
        then trains it."""
        return ssfl.parts.server_last(state, fed, fed.train_users(state.streams))
