"""What is told of a round: the users' numbers, and gradient diversity at the models that everybody started
from."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssfl import diversity, draws
from ssfl.cohort import Cohort
from ssfl.federation import Outcome, State
from ssfl.plan import Owners, objective_of
from ssfl.runs import Event
from ssfl.work import Objective, Work, round_keys

if TYPE_CHECKING:
    from ssfl.simulation import Simulation


def diversity_event(sim: "Simulation", state: State, cohort: Cohort, outcome: Outcome) -> Event:
    """Definition 1 and its variants, at the weights that each trainer started the round from."""
    seed = draws.key(sim.config.run.seed, "diversity")
    size, weights = sim.config.train.batch_size, sim.layout.weights

    def full(objective: Objective, trainers: Tensor, owners: Owners, who: Tensor, rows: Tensor) -> Tensor:
        sizes = owners.sizes[who]
        steps = -(-int(sizes.max()) // size)
        places = torch.arange(steps * size, device=sim.device) % sizes[:, None]
        batches = owners.at(who, places).reshape(len(who), steps, size)
        # the unlabelled loss alone, over all data; labelled images of users are not part of it
        work = Work(objective, round_keys(seed, state.round, trainers), batches, None, ())
        crowd = sim.crowd if len(who) > 1 else None
        share = slice(0, len(who)) if crowd is None else crowd.share(len(who))
        starts = range(share.start, share.stop, sim.plan.at_once)
        parts = [slice(i, min(i + sim.plan.at_once, share.stop)) for i in starts]
        found = [sim.engine.gradients(rows[p], work.of(p), sizes[p]) for p in parts]
        own = torch.cat(found) if found else rows[:0, :weights]
        return own if crowd is None else crowd.gather(own, len(who))

    assert outcome.users is not None
    assert outcome.users.updates is not None
    who = torch.tensor(cohort.users, device=sim.device)
    sent = state.streams[list(cohort.streams)]
    rows = {
        "gradient": full(objective_of(sim.config), who, sim.plan.users, who, sent),
        "update": outcome.users.updates[:, :weights],
    }
    server: dict[str, Tensor | None] = {}
    if outcome.server is not None and outcome.server_sent is not None:
        assert outcome.server.updates is not None
        trainer = torch.tensor([draws.SERVER], device=sim.device)
        start = outcome.server_sent[None]
        server = {
            "gradient": full(Objective("supervised"), trainer, sim.plan.server, trainer * 0, start)[0],
            "update": outcome.server.updates[0, :weights],
        }
    table = diversity.variants(rows, server, cohort.groups)
    return {"event": "diversity", "round": state.round + 1, **table}


def of_users(stats: dict[str, list[float]], norms: list[float], refused: Collection[int]) -> dict[str, Any]:
    """What a round's event tells of its users; means are over those that were not refused, if any."""

    def total(values: list[float]) -> float:
        return sum(value for place, value in enumerate(values) if place not in refused)

    def each(values: list[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]

    told: dict[str, Any] = {
        "user_loss": each(stats["loss"]),
        "user_mask_rate": each(stats["masked"]),
        "user_update_norm": each(norms),
    }
    count, known = len(norms) - len(refused), total(stats["told"])
    if count:
        told |= {
            "loss": total(stats["loss"]) / count,
            "mask_rate": total(stats["masked"]) / count,
            "pseudo_accuracy": total(stats["right"]) / known if known else None,
            "update_norm": total(norms) / count,
        }
    return told
