"""Differential privacy for whole users: each user clips its update and adds Gaussian noise itself.

Neighbouring federations differ in one user, whose images are replaced by any others. What that user sends in
a round then differs by at most twice the clipping norm. Two upper bounds ε follow, at the same δ.
`epsilon_sent` bounds what all updates of one user reveal to the server. `epsilon_model` bounds what the
averaged models reveal to a reader who sees no single update, is no user, and knows neither the seed nor who
took part. docs/security.md says what that means and what it does not cover.
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
    """Returns what users send instead of their models [n, P + Q]. Each update is clipped to the norm `clip`,
    and normal draws [n, P + Q] times `noise` times `clip` are added, also to the running statistics.

    An update that is not finite is replaced by zero, so that nothing but noise is sent.
    """
    updates = rows.double() - sent
    lengths = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
    clipped = torch.where(lengths.isfinite(), updates * (clip / lengths).clamp(max=1), 0.0)
    return (sent + clipped + noise * clip * normal).to(rows.dtype)


def secret(count: int) -> Tensor:
    """Returns normal draws from the operating system's randomness. Nobody may know the noise of a real site,
    and all other draws depend on a seed that the server knows."""
    return draws.normal(torch.frombuffer(bytearray(os.urandom(16 * count)), dtype=torch.int64))


def planned(config: Config) -> Event:
    """Returns the privacy event for a whole run without dropouts. The config must be resolved."""
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
    """Returns the privacy event for the rounds so far, computed from their events."""
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
    """Returns a privacy event as one line of text."""
    over = f"over {event['rounds']} rounds" if event["round"] == 0 else f"after {event['round']} rounds"
    sent, model = (f"{event[name]:.4g}" for name in EPSILONS)
    return (
        f"privacy {over}: ε = {sent} for what a user sends, {model} for the averaged models "
        f"(δ = {event['delta']:.2g}; updates clipped to {event['clip']:g}, noise {event['noise']:g} times "
        "that)"
    )


def _cost(config: Config, parts: int, least: Mapping[int, int]) -> dict[str, Any]:
    """Returns the two bounds ε, `epsilon_sent` and `epsilon_model`, for a user that took part in `parts`
    rounds. `least` maps the size of a round's smallest group to the number of such rounds."""
    privacy, federation = config.privacy, config.federation
    noise, delta = privacy.noise or 0.0, privacy.delta or 0.0
    # a mean of n users contains n draws of noise; for other averages we count only the one of each model
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
    """Returns ε at δ for a series of releases. Each entry is a noise, as a multiple of the clipping norm, and
    the number of releases with it.

    With `drawn` (C, K), C of K users were drawn for each release, without replacement and in secret. Google's
    dp-accounting does the Rényi accounting; the effect of sampling follows Wang, Balle and Kasiviswanathan
    (2019).
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
