"""The method FedProx (Li et al. 2020): users stay near the model w_received that they received, because their
loss has the penalty (μ / 2) · ‖w - w_received‖²."""

from dataclasses import dataclass
from typing import ClassVar

from ssfl.core.fields import setting
from ssfl.core.losses import Losses
from ssfl.federation import Fed, Loss, Method, Named, State, Step
from ssfl.methods import parts


@dataclass(frozen=True)
class FedProx(Method):
    """Users and server train in turn, as in the method `alternate`. The users' loss has a penalty for moving
    away from the received model."""

    threshold: float = setting(0.95, least=0, most=1, what="a probability")
    """τ: a pseudo-label is used if the model's confidence in it is at least this."""
    proximal: float = setting(0.01, least=0, most=1000, what="a weight")
    """μ: the weight of the penalty (μ / 2) · ‖w - w_received‖² on the distance from the received model."""

    defaults: ClassVar = {"model": {"norm": "group"}}

    def uses(self) -> tuple[str, ...]:
        return ("weak", "strong", "received")

    def user_loss(self, step: Step) -> Losses:
        return parts.consistency(step, self.threshold)

    def gradient(self, step: Step, loss: Loss) -> tuple[Named, Named]:
        gradients, metrics = step.gradient(loss)
        if step.role == "server":
            return gradients, metrics
        distances = {name: weight - step.received[name] for name, weight in step.weights.items()}
        return {
            name: gradient + self.proximal * distances[name] for name, gradient in gradients.items()
        }, metrics

    def round(self, state: State, fed: Fed) -> State:
        return parts.server_last(state, fed, fed.train_users(state.streams))
