"""Differential privacy for whole users: each user clips its update and adds Gaussian noise before sending it.

Two federations are neighbours if they differ only in the images of one user. What that user sends in a round
then differs by at most twice the clipping norm. From this, two upper bounds ε are computed for the same δ.
`epsilon_sent` bounds what all updates of one user together reveal to the server. `epsilon_model` bounds what
the averaged models reveal to a reader who sees nothing else. Such a reader sees no single update, is not a
user, and knows neither the seed nor who took part. docs/security.md says what the bounds mean and what they
do not cover.
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
from ssfl.errors import SsflError, one_line

EPSILONS = ("epsilon_sent", "epsilon_model")


def released(sent: Tensor, rows: Tensor, clip: float, noise: float, normal: Tensor) -> Tensor:
    """Returns the models [n, P + Q] that n users send under differential privacy, instead of the models
    `rows` that they trained from `sent`. A model is a row of P weights and Q running statistics.

    Each update is clipped to the norm `clip`. Then `noise` · `clip` · `normal` is added to every number, also
    to the running statistics; `normal` [n, P + Q] are standard normal draws. An update that is not finite is
    replaced by zero, so that only noise is sent.
    """
    updates = rows.double() - sent
    lengths = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
    clipped = torch.where(lengths.isfinite(), updates * (clip / lengths).clamp(max=1), 0.0)
    return (sent + clipped + noise * clip * normal).to(rows.dtype)


def secret(count: int) -> Tensor:
    """Returns `count` standard normal draws made from the operating system's randomness. Real sites use them
    as noise, because the server must not be able to compute it. All other random draws of a run follow from a
    seed that the server knows."""
    return draws.normal(torch.frombuffer(bytearray(os.urandom(16 * count)), dtype=torch.int64))


def planned(config: Config) -> Event:
    """Returns the privacy event for a whole run, before it starts: the bounds `epsilon_sent` and
    `epsilon_model` with their parameters. It is assumed that no user drops out. The config must be
    resolved."""
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
    """Returns the privacy event for the rounds that were played so far: the bounds `epsilon_sent` and
    `epsilon_model` with their parameters. `history` are the run's events."""
    parts: Counter[int] = Counter()
    least: Counter[int] = Counter()
    round = 0
    for event in history:
        if event["event"] == "round":
            round = event["round"]
            parts.update(event["participants"])
            parts.update(event.get("asked_again", []))  # a second answer has fresh noise, so it costs again
            least.update([min(len(group) for group in event["groups"] if group)] if event["returned"] else [])
    return {"event": "privacy", "round": round, **_cost(config, max(parts.values(), default=0), least)}


def describe(event: Event) -> str:
    """Returns a privacy event as one line of text for the user."""
    over = f"over {event['rounds']} rounds" if event["round"] == 0 else f"after {event['round']} rounds"
    sent, model = (f"{event[name]:.4g}" for name in EPSILONS)
    return (
        f"differential privacy {over}: ε = {sent} for the updates that one user sends, ε = {model} for the "
        f"averaged models (δ = {event['delta']:.2g}; updates clipped to the norm {event['clip']:g}, noise "
        f"{event['noise']:g} times this norm)"
    )


def _cost(config: Config, parts: int, least: Mapping[int, int]) -> dict[str, Any]:
    """Returns the two bounds `epsilon_sent` and `epsilon_model` with their parameters, as fields of a privacy
    event.

    `parts` is the largest number of rounds in which any one user took part. `least` maps a size to the number
    of rounds whose smallest group had that size. The size matters because each user adds noise: in the
    average of a small group, the update of one user is hidden by the noise of fewer users.
    """
    privacy, federation = config.privacy, config.federation
    noise, delta = privacy.noise or 0.0, privacy.delta or 0.0
    # a mean over n users contains the noise of n users; for other averages, that of one user is assumed
    linear = federation.combine == "mean" and not (federation.gate or federation.median_fallback)
    rounds = [(noise * math.sqrt(size if linear else 1), count) for size, count in least.items()]
    sent = epsilon([(noise, parts)], delta)
    drawn = federation.participants or 1, config.split.users
    model = min(sent, epsilon(rounds, delta), epsilon(rounds, delta, drawn))
    return {
        "rounds": federation.rounds,
        "clip": privacy.clip,
        "noise": noise,
        "delta": delta,
        **dict(zip(EPSILONS, (sent, model), strict=True)),
    }


def epsilon(
    releases: Iterable[tuple[float, int]], delta: float, drawn: tuple[int, int] | None = None
) -> float:
    """Returns the ε of differential privacy at δ for a series of noisy releases. `releases` are pairs of the
    noise, as a multiple of the clipping norm, and the number of releases with this noise.

    With `drawn` = (C, K), each release used C of K users, drawn at random and in secret, which lowers ε.
    Google's dp-accounting does the Rényi accounting. The effect of sampling follows Wang, Balle and
    Kasiviswanathan (2019).
    """
    dp = library()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for noise, count in releases:
        event = dp.GaussianDpEvent(noise / 2)  # replacing a user moves its update by twice the clipping norm
        if drawn is not None and drawn[0] < drawn[1]:
            event = dp.SampledWithoutReplacementDpEvent(drawn[1], drawn[0], event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def library() -> Any:
    """Returns Google's package dp-accounting; raises if it is not installed."""
    try:
        import dp_accounting.rdp
    except ImportError as error:
        raise SsflError(
            f"[privacy] needs the package dp-accounting, which cannot be imported ({one_line(error, 160)}): "
            "run `pip install 'ssfl[privacy]'`",
            key="privacy",
            fix="pip install 'ssfl[privacy]'",
        ) from error
    return dp_accounting
