"""The method FixMatch (Sohn et al. 2020) without a federation, for comparison: one model is trained on all
images. Its loss is L_s + L_k: the supervised loss on labelled images plus the consistency loss on unlabelled
ones."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.errors import ConfigError
from ssfl.federation import Fed, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class FixMatch(Method):
    """Shows what is possible if all images are in one place: a single "user" has all images, and the labels
    of the labelled ones."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if the model's confidence in it is at least this."""
    views: str = setting("separate", choices=("separate", "joint"))
    """Whether weak and strong views pass through the network in two "separate" batches or together in one
    "joint" batch. With BatchNorm the results differ."""
    teacher_mode: str = setting("train", choices=("eval", "train"))
    """Whether the network makes pseudo-labels in "eval" or in "train" mode. This setting matters only if
    `views` is "separate". A joint batch is always computed in "train" mode."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "split": {"users": 1, "labels_at": "users"},
        "train": {"momentum_policy": "slot"},
    }
    trains_server: ClassVar = False
    note: ClassVar = "one model sees every image: no federation"

    def check(self, config: Any) -> None:
        """Raises ConfigError if there is more than one user, because this method trains a single model on all
        images."""
        users = config.split.users
        if users != 1:
            raise ConfigError(
                f"split.users = {users}: method.name = 'fixmatch' trains a single model. Set split.users=1.",
                key="split.users",
                value=users,
                fix="split.users=1",
            )

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold, self.views, self.teacher_mode)

    def round(self, state: State, fed: Fed) -> State:
        users = fed.train_users(state.streams)
        return state.next(users.means, users.average, momentum_of=[users])
