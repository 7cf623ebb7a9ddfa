"""Makes the events of a round: one with the participants and their metrics, and one with the gradient
diversity."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core import diversity, draws
from ssfl.core.cohort import Cohort
from ssfl.core.events import ROUND_FIELDS, Event
from ssfl.engines.contract import Engine
from ssfl.engines.dist import Dist
from ssfl.engines.local import made_labels
from ssfl.engines.work import Work, round_keys
from ssfl.errors import ConfigError, DivergedError, MethodError
from ssfl.federation import METRICS, Method, Named, State
from ssfl.simulate.log import Log
from ssfl.simulate.plan import Owners, Plan
from ssfl.simulate.rounds import Round


def round_event(plan: Plan, size: int, round: int, fed: Round) -> Event:
    """Returns the event of a round: who took part, the metrics of users and server, and the bytes that were
    sent. `size` is the size of one model in bytes, and `round` counts from 1. Raises if a loss or update is
    not finite, or if a metric of the method has the name of a field that events already have."""
    cohort, log = fed.cohort, fed.log
    of_users = () if log.users is None else log.users.metrics.keys() - {*METRICS, "steps"}
    for name in (*log.metrics, *of_users):
        if name in ROUND_FIELDS:
            raise MethodError(
                f"the method's metric {name!r} has the name of another value in the events of rounds: choose "
                "another name",
                key=name,
            )
    event: Event = {
        "event": "round",
        "round": round,
        "lr": plan.rates(round - 1)[0],
        "participants": list(cohort.drawn),
        "returned": list(cohort.users),
        "groups": [[cohort.users[place] for place in group] for group in cohort.groups],
        "bytes_down": size * len(cohort.drawn) + log.sent_bytes,
        "bytes_up": size * len(cohort.users) + log.reported_bytes,
    }
    if plan.config.federation.gate:
        event["refused"] = {str(cohort.users[place]): reason for place, reason in log.refused.items()}
    if log.cut:
        event["cut"] = {str(cohort.users[place]): float(f"{times:.3g}") for place, times in log.cut.items()}
    if log.against:
        event["against"] = {
            str(cohort.users[place]): float(f"{weight:.3g}") for place, weight in log.against.items()
        }
    if log.users is not None:
        names = list(log.users.metrics)
        numbers = torch.stack([*log.users.metrics.values(), log.users.norms])
        # the CPU waits for the GPU here, so all numbers come together
        *metrics, norms = numbers.tolist()
        measured = dict(zip(names, metrics, strict=True))
        for place, (user, *values) in enumerate(zip(cohort.users, measured["loss"], norms, strict=True)):
            if place not in log.refused:
                require_finite(plan.config, round, f"user {user}", values)
        event |= _of_users(measured, norms, log.refused)
        steps = [len(plan.rates(round - 1))] * len(norms)
        if "steps" in measured or plan.local_steps is None:  # real sites do not report their steps
            event["images"] = int(sum(measured.get("steps", steps))) * plan.batch_size("user")
    if log.server is not None:
        server_numbers = torch.stack([log.server.metrics["loss"], log.server.norms]).mean(1).tolist()
        event["server_loss"], event["server_update_norm"] = server_numbers
        event["server_models"] = log.server_steps
        images = plan.batch_size("server") * len(plan.rates(round - 1, "server"))
        event["server_images"] = images * log.server_steps
        require_finite(plan.config, round, "the server", server_numbers)
    return event | log.metrics


def require_finite(config: Config, round: int, whose: str, numbers: list[float]) -> None:
    """Raises DivergedError if one of these numbers is not finite. `whose` says in the message whose loss or
    update they are."""
    if all(math.isfinite(number) for number in numbers):
        return
    federation, rate = config.federation, config.train.lr
    advice = f"lower train.lr (now {rate}) or add train.warmup steps"
    key, value = "train.lr", rate
    if federation.attackers:
        advice = f"lower federation.attack_scale (now {federation.attack_scale}), {advice}"
        key, value = "federation.attack_scale", federation.attack_scale
    raise DivergedError(
        f"training diverged in round {round}: the loss or update of {whose} is not finite. "
        f"Start a new run: {advice}",
        key=key,
        value=value,
    )


def diversity_event(
    engine: Engine, ranks: Dist | None, method: Method, plan: Plan, state: State, cohort: Cohort, log: Log
) -> Event:
    """Returns the event with the gradient diversity of a round (Definition 1 of Zhang et al. 2020) and its
    variants. The gradient of each user is taken at the model that the user received. The server's gradient is
    taken at the model from which the server started."""
    seed = draws.key(plan.config.run.seed, "diversity")
    size, device, weights = plan.config.train.batch_size, state.average.device, state.momentum.shape[1]

    def full(
        role: str, trainers: Tensor, owners: Owners, members: Tensor, rows: Tensor, sent: Named
    ) -> Tensor:
        """Returns the gradients [n, P] of n trainers, which are users or the server (`role`). Each gradient
        is over all images of the trainer, at its model in `rows` [n, P + Q]. A model is a row of P weights
        and Q running statistics.

        `trainers` [n] are numbers from which random keys are made. `members` [n] says which owner in `owners`
        has the images of each trainer. `sent` are the tensors that users were sent besides their models.
        """
        sizes = owners.sizes[members]
        steps = -(-int(sizes.max()) // size)
        places = torch.arange(steps * size, device=device) % sizes[:, None]
        batches = owners.at(members, places).reshape(len(members), steps, size)
        # the loss is on unlabelled images only, even if users also have labelled ones
        views = ("weak",) if role == "server" else plan.views
        work = Work(role, views, round_keys(seed, state.round, trainers), batches, None, (), sent=sent)
        return _in_parts(
            engine, ranks if len(members) > 1 else None, method, plan.at_once, rows, work, sizes, weights
        )

    assert log.users is not None
    assert log.users.updates is not None
    members = torch.tensor(cohort.users, device=device)
    received = state.streams[list(cohort.streams)]
    gradients = full("user", members, plan.users, members, received, log.sent)
    rows = {"gradient": gradients, "update": log.users.updates[:, :weights]}
    server: dict[str, Tensor | None] = {}
    if log.server is not None and log.server_sent is not None:
        assert log.server.updates is not None
        trainer = torch.tensor([draws.SERVER], device=device)
        server = {
            "gradient": full("server", trainer, plan.server, trainer * 0, log.server_sent[None], {})[0],
            "update": log.server.updates[0, :weights],
        }
    table = diversity.variants(rows, server, cohort.groups)
    return {"event": "diversity", "round": state.round + 1, **table}


def _in_parts(
    engine: Engine,
    ranks: Dist | None,
    method: Method,
    at_once: int,
    rows: Tensor,
    work: Work,
    sizes: Tensor,
    weights: int,
) -> Tensor:
    """Returns the gradients [n, P] of n trainers (users, or the server). Each gradient is over all images of
    the trainer; `sizes` [n] are the numbers of these images. P is the number of weights. To limit memory, at
    most `at_once` gradients are computed together. With torchrun, each process computes some of the
    gradients, and every process gets all of them."""
    count = len(rows)
    share = slice(0, count) if ranks is None else ranks.share(count)
    gradients = []
    for first in range(share.start, share.stop, at_once):
        part = slice(first, min(first + at_once, share.stop))
        part_work = work.of(part)
        if work.role == "user" and method.label is not None:
            labels = made_labels(engine, method, rows[part], part_work)
            if not torch.equal(labels.images, part_work.batches):
                raise _not_measurable(method, "its batches have only images with a pseudo-label")
            part_work = part_work.with_labels(labels._replace(lr_scale=None))
        try:
            gradients.append(engine.gradients(rows[part], part_work, sizes[part]))
        except KeyError as error:  # the loss reads a tensor that is not there
            raise _not_measurable(method, f"its loss needs {error}, which gradient() adds") from error
    together = torch.cat(gradients) if gradients else rows[:0, :weights]
    return together if ranks is None else ranks.gather(together, count)


def _not_measurable(method: Method, why: str) -> ConfigError:
    return ConfigError(
        "run.diversity_every is set, but gradient diversity cannot be measured with method.name = "
        f"{method.name!r}, because {why}: set run.diversity_every=0",
        key="run.diversity_every",
        value=method.name,
        fix="run.diversity_every=0",
    )


def _of_users(
    metrics: dict[str, list[float]], norms: list[float], refused: Collection[int]
) -> dict[str, Any]:
    """Returns the fields of a round's event that are about users. They are the loss, mask rate and update
    norm of each user, and means of metrics over users. The means leave out users that the gate refused, whose
    positions are in `refused`."""

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
