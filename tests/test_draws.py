"""Named randomness: the same name gives the same bits, and the bits look random."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssfl.core import draws

WORD = st.integers(-(2**63), 2**63 - 1)


@given(seed=WORD, parts=st.lists(st.integers(-5, 2**40), max_size=4), last=st.integers(-5, 2**40))
def test_folding_a_key_is_naming_one_part_more(seed: int, parts: list[int], last: int) -> None:
    start = torch.tensor(draws.key(seed, "weak", *parts))
    whole = draws.key(seed, "weak", *parts, last)
    assert int(draws.fold(start, last)) == whole
    assert int(draws.fold(start, torch.tensor(last))) == whole


def test_the_hash_is_splitmix64() -> None:
    # the first outputs of splitmix64 from state 0 (Vigna's reference program)
    assert [draws._mix_int(n * draws.GAMMA & draws._WORD) for n in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_names_that_differ_anywhere_give_other_draws() -> None:
    names = [
        draws.key(seed, purpose, round, user)
        for seed in range(5)
        for purpose in draws.PURPOSES
        for round in range(10)
        for user in range(-1, 10)
    ]
    assert len(set(names)) == len(names)


def test_uniform_draws_are_uniform_and_below_one() -> None:
    values = draws.uniform(draws.bits(torch.tensor(draws.key(1, "strong")), 200_000)).numpy()
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, 50, (0, 1))
    assert np.abs(counts / 4000 - 1).max() < 0.07
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("bound", [1, 2, 3, 9, 14, 2**31])
def test_integers_stay_below_their_bound_and_reach_it(bound: int) -> None:
    values = draws.below(draws.bits(torch.tensor(draws.key(3, "weak")), 10_000), bound)
    assert int(values.min()) >= 0
    assert int(values.max()) < bound
    if bound < 20:
        assert values.unique().tolist() == list(range(bound))
