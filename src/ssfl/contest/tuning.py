"""Chooses a method's learning rate and threshold in a contest, on validation images."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from ssfl.contest.protocol import CHOOSING, Entry, Rules, next_power, rate, thresholds
from ssfl.contest.texts import Try, choice
from ssfl.errors import ConfigError


def tuned(
    rules: Rules,
    method: str,
    seeds: Sequence[int],
    images: int,
    scores_of: Callable[[Iterable[Entry]], Iterator[float]],
    tell: Callable[[str], None],
) -> list[Try]:
    """Tries several learning rates, then several thresholds with the best learning rate, in runs of half the
    length, and tells after each of the two what was chosen. Returns all tries. Each try has a run with each
    of the `seeds`, and its accuracy is their mean. Together these runs have so many validation `images`.

    While the best learning rate is the smallest or largest that was tried, the next one is tried, too, but
    only `protocol.FURTHER` times. A learning rate that the method refuses is left out. `scores_of`
    plays runs and yields their validation accuracies, or -1 if one diverged.
    """
    config = rules.entry(method, CHOOSING, half=True).config

    def scored(options: tuple[str, ...]) -> Try:
        ends: list[float] = []
        for end in scores_of(rules.entry(method, seed, options, half=True) for seed in seeds):
            ends.append(end)
            if end < 0:
                return -1.0, options
        return statistics.mean(ends), options

    rates: list[Try] = []
    scores: dict[int, float | None] = {}
    while (power := next_power(scores)) is not None:
        option = rate(config, power)
        try:
            rules.entry(method, CHOOSING, (option,), half=True)
        except ConfigError as error:
            tell(f"{option} is left out: {error}")
            scores[power] = None
            continue
        rates.append(scored((option,)))
        scores[power] = rates[-1][0]
    tell(choice(method, rates, images))
    highest, taken = max(rates, key=lambda one: one[0])
    others = [scored((*taken, threshold)) for threshold in thresholds(config)]
    if others:
        default = f"method.threshold={vars(config.method)['threshold']:g}"
        alone = [(highest, (default,)), *((end, options[-1:]) for end, options in others)]
        tell(choice(method, alone, images, default))
    return rates + others
