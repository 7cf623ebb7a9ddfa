"""Computes what simulated users send back to the server. Honest users send the model that they trained;
attackers send a manipulated one. With the section [privacy] of the config, every update is clipped and noise
is added."""

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
    classes: int,
    round: int,
    users: Sequence[int],
    sent: Tensor,
    rows: Tensor,
) -> Tensor:
    """Returns the models [n, P + Q] that the server receives from n users. They are the trained models
    `rows`, except for attackers and with differential privacy.

    `sent` [n, P + Q] are the models that the users received, and `rows` [n, P + Q] are those models after
    training. A model is a row of P weights and Q running statistics.
    """
    federation, seed = config.federation, config.run.seed
    clip, noise = config.privacy.clip, config.privacy.noise
    if clip is None and not federation.attackers:
        return rows
    share = federation.attackers
    attackers = attacks.attacking_users(config.split.users, share, seed) if share else frozenset[int]()
    kind = attacks.kind_in(federation.attack, round)
    rows = rows.clone()
    # one user at a time, because the random draws need more memory than the model
    for place, user in enumerate(users):
        if clip is not None and noise is not None:
            one = slice(place, place + 1)
            key = torch.tensor(draws.key(seed, "privacy", round, user), device=rows.device)
            normal = draws.normal(draws.bits(key, 2 * layout.length))
            rows[one] = privacy.released(sent[one], rows[one], clip, noise, normal)
        if user in attackers and kind is not None:
            rows[place] = attacks.corrupt(
                kind,
                sent[place],
                rows[place],
                layout,
                classes,
                draws.key(seed, "attack", round, user),
                federation.attack_scale,
            )
    return rows
