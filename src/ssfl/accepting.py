"""What users' models go through before they count: the gate, the rule that combines them, and a server
that judges averages by its own labels."""

import math
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from ssfl import averaging, draws
from ssfl.cohort import Cohort
from ssfl.federation import Combine, Gate, Guard, State
from ssfl.gate import judge

if TYPE_CHECKING:
    from ssfl.simulation import Simulation

GUARDED = 1000
"""About how many of the server's images its guard looks at."""


class Rules(TypedDict):
    """Of a round, as `federation.play_round` takes them; None is what the paper does."""

    gate: Gate | None
    combine: Combine | None
    guard: Guard | None


def rules(sim: "Simulation", state: State, cohort: Cohort) -> Rules:
    """As this experiment's settings want them."""
    method = sim.config.method

    def gate(sent: Tensor, rows: Tensor) -> list[str]:
        return judge(sent, rows, state.strikes[list(cohort.users)])

    def loss(row: Tensor) -> float:
        images = sim.plan.server.images
        found = sim.score(row, sim.pool.images[images], sim.pool.labels[images].cpu()).loss
        return found if math.isfinite(found) else math.inf

    def combine(rows: Tensor, users: Tensor, weights: Tensor | None) -> Tensor:
        if method.combine == "distance":
            key = torch.tensor(draws.key(sim.config.run.seed, "consensus", state.round))
            found = averaging.sub_consensus(rows, sim.plan.users.sizes[users], sim.layout.sizes, key)
        else:
            found = averaging.combined(method.combine, rows, weights)
        return averaging.checked(found, rows, loss) if method.check else found

    def guard(row: Tensor) -> float:
        sim.prepare(state.round + 1)
        each = [share for share in sim.score(row, *sim.guarded).per_class if share is not None]
        return sum(each) / len(each) - 1 / len(each)

    plain = method.combine == "mean" and method.weighting == "even" and not method.fill and not method.check
    return {
        "gate": gate if method.gate else None,
        "combine": None if plain else combine,
        "guard": guard if method.guard else None,
    }


def guarded(sim: "Simulation") -> tuple[Tensor, Tensor]:
    """The images that a guard looks at, some of every class, and their labels."""
    images = sim.plan.server.images
    images = images[sim.pool.labels[images].argsort(stable=True)]
    images = images[:: -(-len(images) // GUARDED)]
    return sim.pool.images[images], sim.pool.labels[images].cpu()
