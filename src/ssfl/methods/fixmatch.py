"""FixMatch (Sohn et al. 2020), centralised: one model sees all images. The loss of every step is L_s + L_k,
the sum of the server's and the users' losses."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.errors import ConfigError
from ssfl.federation import Fed, Method, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class FixMatch(Method):
    """Shows what is possible with all images in one place: a single "user" holds them all, with the labels of
    the labelled ones."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if its confidence is at least this."""
    views: str = setting("separate", choices=("separate", "joint"))
    """Whether weak and strong views pass through the network in "separate" batches or in one "joint" one."""
    teacher_mode: str = setting("train", choices=("eval", "train"))
    """Whether pseudo-labels come from the network in "eval" or in "train" mode."""

    defaults: ClassVar = {
        "model": {"norm": "group"},
        "split": {"users": 1, "labels_at": "users"},
        "train": {"momentum_policy": "slot"},
    }
    trains_server: ClassVar = False
    note: ClassVar = "one model sees every image: no federation"

    def check(self, config: Any) -> None:
        """Raises if there is more than one user, since a single model is trained."""
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
