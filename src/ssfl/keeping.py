"""What some methods keep between rounds besides models: movements, averages, counts."""

from dataclasses import replace

import torch
from torch import Tensor

from ssfl.federation import State
from ssfl.settings import Method


def first(method: Method, row: Tensor, weights: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Before the first round; `weights` [S, P] are the streams', `counts` the server's images by class."""
    kept: dict[str, Tensor] = {}
    if method.server_momentum:
        kept["velocity"] = torch.zeros_like(weights)
    if method.slow:
        kept["slow"] = row.clone()
    if method.thresholds == "balanced":
        kept["shares"] = counts
    if method.guard:
        kept["best"] = row.new_zeros(1)
    return kept


def evaluated(state: State) -> Tensor:
    """The row that is evaluated and kept: the slow average where there is one."""
    return state.memory.get("slow", state.average)


def over_rounds(method: Method, state: State, users: bool) -> State:
    """The averages over rounds: CBAFed's residual connection, where users took part, and the slow one that
    is evaluated."""
    memory = state.memory
    if method.residual and users and state.round % method.residual == 0:
        average = (state.average + memory.get("stored", state.average)) / 2
        memory = memory | {"stored": average.clone()}
        state = replace(state, average=average, streams=average.repeat(len(state.streams), 1))
    if method.slow:
        stays = min(method.slow, state.round / (state.round + 9))  # the first rounds are soon forgotten
        memory = memory | {"slow": stays * memory["slow"] + (1 - stays) * state.average}
    return replace(state, memory=memory)
