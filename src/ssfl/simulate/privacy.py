"""Differential privacy for a user as a whole: it cuts its update to a length and adds Gaussian noise itself.

Neighbours are two federations in which one user's images are replaced by any others, so that what it sends
in a round differs by at most twice the length. Two numbers follow, both upper bounds, at the same δ:
`epsilon_sent` is about all that one user sends, as the centre sees it; `epsilon_model` is about the averaged
models, for a reader who sees no single update, is no user, and knows neither the seed nor who took part.
docs/security.md says what that means and what it does not cover.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.core.events import Event
from ssfl.core.schedule import head_start
from ssfl.errors import SsflError

EPSILONS = ("epsilon_sent", "epsilon_model")


def released(sent: Tensor, rows: Tensor, clip: float, noise: float, normal: Tensor) -> Tensor:
    """What users give away instead of their models [n, P + Q], statistics and all: an update of length
    `clip` at most, with `noise` times `clip` times the normal draws [n, P + Q] on it.

    An update that is not finite counts as none: nothing but noise may tell of the images.
    """
    updates = rows.double() - sent
    lengths = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
    cut = torch.where(lengths.isfinite(), updates * (clip / lengths).clamp(max=1), 0.0)
    return (sent + cut + noise * clip * normal).to(rows.dtype)


def secret(count: int) -> Tensor:
    """Normal draws from the operating system: a real site's noise must be known to nobody, and every other
    draw is named by a seed that the centre knows."""
    return draws.normal(torch.frombuffer(bytearray(os.urandom(16 * count)), dtype=torch.int64))


def planned(config: Config) -> Event:
    """What all rounds will have cost if everybody drawn comes back; the config is resolved."""
    federation = config.federation
    participants, groups = federation.participants or 1, federation.groups or 1
    least = participants // groups
    if federation.group_sizes == "filled":
        full = -(-participants // groups)
        least = participants % full or full
    rounds = federation.rounds or 1
    rounds -= head_start(config.federation.head_start, rounds)
    return {"event": "privacy", "round": 0, **_cost(config, rounds, {least: rounds})}


def spent(config: Config, history: Iterable[Event]) -> Event:
    """What the rounds of these events have cost."""
    parts: Counter[int] = Counter()
    least: Counter[int] = Counter()
    round = 0
    for event in history:
        if event["event"] == "round":
            round = event["round"]
            parts.update(event["participants"])
            parts.update(event.get("asked_again", []))  # each answer has fresh noise
            least.update([min(len(group) for group in event["groups"] if group)] if event["returned"] else [])
    return {"event": "privacy", "round": round, **_cost(config, max(parts.values(), default=0), least)}


def told(event: Event) -> str:
    """A privacy event in one line."""
    over = f"over {event['rounds']} rounds" if event["round"] == 0 else f"after {event['round']} rounds"
    sent, model = (f"{event[name]:.4g}" for name in EPSILONS)
    return (
        f"privacy {over}: ε = {sent} for what a user sends, {model} for the averaged models "
        f"(δ = {event['delta']:.2g}; updates cut to {event['clip']:g}, noise {event['noise']:g} times that)"
    )


def _cost(config: Config, parts: int, least: Mapping[int, int]) -> dict[str, Any]:
    """Of a user that took part so often, in rounds counted by the size of their least group."""
    wanted, federation = config.privacy, config.federation
    noise, delta = wanted.noise or 0.0, wanted.delta or 0.0
    # the mean of n users carries their n noises; of another average we only know that each model has its own
    linear = federation.combine == "mean" and not (federation.gate or federation.check)
    rounds = [(noise * math.sqrt(size if linear else 1), count) for size, count in least.items()]
    sent = epsilon([(noise, parts)], delta)
    drawn = federation.participants or 1, config.split.users
    model = min(sent, epsilon(rounds, delta), epsilon(rounds, delta, drawn))
    return {
        "rounds": federation.rounds,
        "clip": wanted.clip,
        "noise": noise,
        "delta": delta,
        **dict(zip(EPSILONS, (sent, model), strict=True)),
    }


def epsilon(
    releases: Iterable[tuple[float, int]], delta: float, drawn: tuple[int, int] | None = None
) -> float:
    """ε at δ of releases whose noise is so many times the length of an update, each so often.

    With `drawn` (C, K), C of K users were drawn without replacement and in secret for each. Rényi accounting
    by Google's dp-accounting; sampling after Wang, Balle and Kasiviswanathan (2019).
    """
    dp = library()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for noise, count in releases:
        event = dp.GaussianDpEvent(noise / 2)  # replacing a user moves its update by twice its length
        if drawn is not None and drawn[0] < drawn[1]:
            event = dp.SampledWithoutReplacementDpEvent(drawn[1], drawn[0], event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def library() -> Any:
    """Google's dp-accounting."""
    try:
        import dp_accounting.rdp
    except ImportError as error:
        raise SsflError("[privacy] needs an accountant: pip install 'ssfl[privacy]'") from error
    return dp_accounting
