"""The learning rate at each step, and the length of the head start: the first rounds, in which only the
server trains."""

import math


def head_start(share: float, rounds: int) -> int:
    """Returns the number of rounds at the start in which only the server trains. It is the fraction `share`
    of all rounds, rounded down."""
    return int(share * rounds + 1e-9)


def learning_rate(
    step: float,
    *,
    base: float,
    steps: float,
    warmup: float = 0,
    cycles: float = 7 / 16,
    floor: float = 1e-4,
    annealing: bool = False,
) -> float:
    """Returns the learning rate at a step. In the first `warmup` of all `steps` steps, it rises linearly from
    zero to `base`. After them it is base · max(cos(π · cycles · progress), floor), the formula of the paper
    (Zhang et al. 2020). Here progress = (step - warmup) / (steps - warmup).

    The cosine is periodic. With `cycles` above 1/2 the rate falls to the floor, base · floor. Above 3/2 it
    rises again before the end, and at 2 it ends at `base`. With `annealing`, the rate after the warmup is
    base · max((1 + cos(π · progress)) / 2, floor) instead.
    """
    if step < warmup:
        return base * step / warmup
    progress = (step - warmup) / (steps - warmup) if steps != warmup else 0.0
    if annealing:
        return base * max((1 + math.cos(math.pi * min(progress, 1.0))) / 2, floor)
    return base * max(math.cos(math.pi * cycles * progress), floor)
