"""What a round's events say: the users' metrics, and gradient diversity at the models that everybody started
from."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ssfl.core import diversity, draws
from ssfl.core.cohort import Cohort
from ssfl.engines.contract import Engine
from ssfl.engines.dist import Dist
from ssfl.engines.local import made_labels
from ssfl.engines.work import Work, round_keys
from ssfl.errors import ConfigError
from ssfl.federation import METRICS, Method, State
from ssfl.simulate.plan import Owners, Plan
from ssfl.simulate.rounds import Log

Event = dict[str, Any]


def diversity_event(
    engine: Engine, crowd: Dist | None, method: Method, plan: Plan, state: State, cohort: Cohort, log: Log
) -> Event:
    """Definition 1 and its variants, at the weights that each trainer started the round from."""
    seed = draws.key(plan.config.run.seed, "diversity")
    size, device, weights = plan.config.train.batch_size, state.average.device, state.momentum.shape[1]

    def full(role: str, trainers: Tensor, owners: Owners, who: Tensor, rows: Tensor) -> Tensor:
        sizes = owners.sizes[who]
        steps = -(-int(sizes.max()) // size)
        places = torch.arange(steps * size, device=device) % sizes[:, None]
        batches = owners.at(who, places).reshape(len(who), steps, size)
        # the unlabelled loss alone, over all data; labelled images of users are not part of it
        views = ("weak",) if role == "server" else plan.views
        work = Work(role, views, round_keys(seed, state.round, trainers), batches, None, ())
        return _in_parts(
            engine, crowd if len(who) > 1 else None, method, plan.at_once, rows, work, sizes, weights
        )

    assert log.users is not None
    assert log.users.updates is not None
    who = torch.tensor(cohort.users, device=device)
    gradients = full("user", who, plan.users, who, state.streams[list(cohort.streams)])
    rows = {"gradient": gradients, "update": log.users.updates[:, :weights]}
    server: dict[str, Tensor | None] = {}
    if log.server is not None and log.server_sent is not None:
        assert log.server.updates is not None
        trainer = torch.tensor([draws.SERVER], device=device)
        server = {
            "gradient": full("server", trainer, plan.server, trainer * 0, log.server_sent[None])[0],
            "update": log.server.updates[0, :weights],
        }
    table = diversity.variants(rows, server, cohort.groups)
    return {"event": "diversity", "round": state.round + 1, **table}


def _in_parts(
    engine: Engine,
    crowd: Dist | None,
    method: Method,
    at_once: int,
    rows: Tensor,
    work: Work,
    sizes: Tensor,
    weights: int,
) -> Tensor:
    """Everybody's gradients over all data, so many trainers at a time, in all processes."""
    count = len(rows)
    share = slice(0, count) if crowd is None else crowd.share(count)
    gradients = []
    for first in range(share.start, share.stop, at_once):
        part = slice(first, min(first + at_once, share.stop))
        mine = work.of(part)
        if work.role == "user" and method.label is not None:
            labels = made_labels(engine, method, rows[part], mine)
            if not torch.equal(labels.images, mine.batches):
                raise ConfigError(
                    f"run.diversity_every does not go with method.name = {method.name!r}, which fills its "
                    "batches with the images that it has labelled: set run.diversity_every=0",
                    key="run.diversity_every",
                    fix="run.diversity_every=0",
                )
            mine = mine.with_labels(labels._replace(pace=None))
        gradients.append(engine.gradients(rows[part], mine, sizes[part]))
    own = torch.cat(gradients) if gradients else rows[:0, :weights]
    return own if crowd is None else crowd.gather(own, count)


def of_users(metrics: dict[str, list[float]], norms: list[float], refused: Collection[int]) -> dict[str, Any]:
    """What a round's event says of its users; means are over those that were not refused, if any."""

    def total(values: list[float]) -> float:
        return sum(value for place, value in enumerate(values) if place not in refused)

    def each(values: list[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]

    event: dict[str, Any] = {
        "user_loss": each(metrics["loss"]),
        "user_mask_rate": each(metrics["mask_rate"]),
        "user_update_norm": each(norms),
    }
    count, known = len(norms) - len(refused), total(metrics["known_rate"])
    if count:
        event |= {
            "loss": total(metrics["loss"]) / count,
            "mask_rate": total(metrics["mask_rate"]) / count,
            "pseudo_accuracy": total(metrics["correct_rate"]) / known if known else None,
            "update_norm": total(norms) / count,
        }
        event |= {name: total(values) / count for name, values in metrics.items() if name not in METRICS}
    return event
