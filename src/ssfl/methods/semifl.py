"""The method SemiFL (Diao, Ding and Tarokh 2022): users make pseudo-labels once a round and train with a
"fix" and a "mix" loss, and the server trains last.

By default, two parts of the published method are left out. One is BatchNorm statistics over every user's
images, which a real federation could not compute. The other is 5 local epochs with batches of 10 images. The
preset semifl-published has both, and docs/fidelity.md says what still differs from the authors' code.
"""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core import losses
from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Labels, Look, Method, Named, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class SemiFL(Method):
    """Users train only on images with confident pseudo-labels. The fix loss uses a strong view of each image,
    and the mix loss uses the image mixed with another one (mixup). The server trains last."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: an image gets a pseudo-label if the confidence of the received model is at least this."""
    mix: float = setting(1.0, least=0, most=100, what="a weight")
    """λ: the weight of the mix loss. 0 switches it off."""
    alpha: float = setting(0.75, least=1e-3, most=100, what="a positive number")
    """The value of both parameters of the Beta distribution from which the shares for mixing two images are
    drawn."""
    momentum: float = setting(0.5, least=0, most=0.999, what="a momentum")
    """β, the server's momentum: this fraction of the last round's movement of the model is added to this
    round's."""

    defaults: ClassVar = {"model": {"norm": "group"}, "train": {"weight_decay": 5e-4, "clip": 1.0}}
    note: ClassVar = "without the published BatchNorm statistics over every user's images"

    def needs(self) -> tuple[str, ...]:
        return ("reports",)

    def uses(self) -> tuple[str, ...]:
        return ("weak", "strong") if self.mix else ("strong",)

    def passes(self) -> int:
        return 1 + bool(self.mix)

    def label(self, look: Look) -> Labels:
        look = parts.once_per_image(look)
        labels = parts.labelled(look, parts.confident(look, self.threshold), fill=True)
        return parts.mixed(labels, look, self.alpha) if self.mix else labels

    def user_loss(self, step: Step) -> Losses:
        """Returns the users' loss: the fix loss on strong views, plus λ times the mix loss on mixtures of two
        images."""
        fix = parts.round_labels(step)
        if not self.mix:
            return fix
        tensors = step.tensors
        share = tensors["share"][:, None]
        part = share.view(-1, *[1] * (step.weak.dim() - 1))  # images, or stored features of any shape
        images = (part * step.weak + (1 - part) * tensors["partner"]).to(step.weak.dtype)
        logits = step.forward(images, draw="mix")
        mix = losses.mixture(logits, tensors["labels"], tensors["partner_labels"], share)
        return fix._replace(loss=fix.loss + self.mix * mix * tensors["mask"])

    def initial(self, state: State, fed: Fed) -> Named:
        return parts.still(state, self.momentum)

    def round(self, state: State, fed: Fed) -> State:
        users = fed.train_users(state.streams)
        streams, velocity = parts.momentum(state, users, self.momentum)
        return parts.server_last(state, fed, users, streams, **velocity)
