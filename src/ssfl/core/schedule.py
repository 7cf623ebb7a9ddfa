"""When users come in, and the learning rate."""

import math


def head_start(share: float, rounds: int) -> int:
    """How many of the rounds the server plays before users take part; never all."""
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
    """The paper's formula, literally: base · max(cos(π · cycles · (t - warmup) / (steps - warmup)), floor).

    Before `warmup` the rate rises linearly from zero. The cosine is periodic: with `cycles` above
    1/2 it reaches the floor, and above 3/2 it rises again before the end, at 2 to the full base rate (2.3
    ends on the way down again, at 0.588 · base). With `annealing` it is base · (1 + cos(π · progress)) / 2.
    """
    if step < warmup:
        return base * step / warmup
    progress = (step - warmup) / (steps - warmup) if steps != warmup else 0.0
    if annealing:
        return base * max((1 + math.cos(math.pi * min(progress, 1.0))) / 2, floor)
    return base * max(math.cos(math.pi * cycles * progress), floor)
