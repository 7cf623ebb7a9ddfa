"""What simulated users send back: their models, with noise where that is asked; attackers send garbage."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssfl.config.settings import Config
from ssfl.core import draws
from ssfl.core.rows import Layout
from ssfl.simulate import attacks, privacy


def sent_back(
    config: Config,
    layout: Layout,
    round: int,
    users: Sequence[int],
    sent: Tensor,
    rows: Tensor,
) -> Tensor:
    """The rows [n, P + Q] that the server gets from users who were sent others and trained to these."""
    federation, seed = config.federation, config.run.seed
    clip, noise = config.privacy.clip, config.privacy.noise
    if clip is None and not federation.attackers:
        return rows
    share = federation.attackers
    attackers = attacks.who(config.split.users, share, seed) if share else frozenset[int]()
    rows = rows.clone()
    for place, user in enumerate(users):  # one at a time: the draws of a row are wider than the row
        if clip is not None and noise is not None:
            own = slice(place, place + 1)
            key = torch.tensor(draws.key(seed, "privacy", round, user), device=rows.device)
            normal = draws.normal(draws.bits(key, 2 * layout.length))
            rows[own] = privacy.released(sent[own], rows[own], clip, noise, normal)
        if user in attackers:
            name = draws.key(seed, "attack", round, user)
            garbage = federation.attack, sent[place], rows[place], layout, name, federation.attack_scale
            rows[place] = attacks.corrupt(*garbage)
    return rows
