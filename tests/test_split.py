"""Who gets what: nothing lost, nothing copied, the paper's formula to within one image."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssfl.data import apportion, split
from ssfl.errors import ConfigError


def labels_of(sizes: list[int], seed: int = 0) -> np.ndarray:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(seed).permutation(labels)


def owners_once(parts: split.Parts, count: int) -> bool:
    """Every image belongs to exactly one owner."""
    owned = np.concatenate([parts.server, *parts.users, *(parts.labelled or [])])
    return sorted(owned.tolist()) == list(range(count))


def pairwise_skew(labels: np.ndarray, users: list[np.ndarray]) -> float:
    """Definition 2 as it is printed, over all pairs."""
    classes = labels.max() + 1
    shares = [np.bincount(labels[u], minlength=classes) / len(u) for u in users]
    pairs = list(itertools.combinations(shares, 2))
    return float(np.mean([np.abs(a - b).sum() / 2 for a, b in pairs])) if pairs else 0.0


CASES = st.tuples(
    st.lists(st.integers(30, 90), min_size=2, max_size=7),
    st.integers(1, 15),
    st.sampled_from([0, 0.1, 0.4, 0.73, 1]),
)


@given(case=CASES, server=st.integers(0, 20), seed=st.integers(0, 5))
def test_skewed_follows_the_formula(case: tuple[list[int], int, float], server: int, seed: int) -> None:
    sizes, users, skew = case
    labels = labels_of(sizes)
    parts = split.skewed(labels, users, skew, server, seed)
    assert owners_once(parts, len(labels))
    classes = len(sizes)
    at_server = np.bincount(labels[parts.server], minlength=classes)
    assert at_server.tolist() == [server // classes + (i < server % classes) for i in range(classes)]

    left = np.array(sizes) - at_server
    share = left / left.sum()
    mains, sharers = apportion.main_classes(left, users)
    counts = split.class_counts(labels, parts.users)
    owner = 0
    for main, among in zip(mains, sharers, strict=True):
        for _ in range(among):
            expected = [
                (skew * left[i] * (i in main) + (1 - skew) * left[i] * sum(share[j] for j in main)) / among
                for i in range(classes)
            ]
            assert np.abs(counts[owner] - expected).max() < 1 + 1e-9
            assert abs(counts[owner].sum() - sum(left[j] for j in main) / among) < 1 + 1e-9
            owner += 1
    assert owner == users


@given(
    labels=st.lists(st.integers(0, 4), min_size=40, max_size=80).map(np.array), users=st.integers(1, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_measured_skew_is_definition_2(labels: np.ndarray, users: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(labels))
    parts = [np.sort(part) for part in np.array_split(order, users)]
    assert split.measured_skew(labels, parts) == pytest.approx(pairwise_skew(labels, parts), abs=1e-12)


@pytest.mark.parametrize("skew", [0.0, 0.4, 1.0])
def test_one_main_class_each_measures_the_skew_that_was_asked_for(skew: float) -> None:
    labels = labels_of([1000] * 10)
    parts = split.skewed(labels, users=10, skew=skew, server_labels=1000, seed=2019)
    assert split.measured_skew(labels, parts.users) == pytest.approx(skew, abs=0.002)
    assert {len(user) for user in parts.users} == {900}


def test_several_users_of_a_main_class_measure_less() -> None:
    # with m users per class, R · (1 - P[same main class]): two of ten classes shared
    labels = labels_of([600] * 10)
    parts = split.skewed(labels, 20, 1.0, 0, 1)
    assert split.measured_skew(labels, parts.users) == pytest.approx(1 - 1 / 19, abs=1e-3)


@pytest.mark.parametrize("users", [1, 2, 3, 5, 7, 10, 11, 16, 23, 40])
def test_users_come_out_as_equal_as_the_classes_allow(users: int) -> None:
    sizes = np.array([50, 51, 49, 50, 52, 48, 50, 50, 50, 50])
    mains, sharers = apportion.main_classes(sizes, users)
    assert sum(sharers) == users
    assert sorted(label for row in mains for label in row) == list(range(10))
    if users <= 10:
        assert {len(row) for row in mains} <= {10 // users, -(-10 // users)}
    else:
        assert max(sharers) - min(sharers) <= 1


@given(sizes=st.lists(st.integers(1, 60), min_size=3, max_size=6), users=st.integers(2, 3))
def test_dealt_classes_cannot_be_evened_by_any_swap(sizes: list[int], users: int) -> None:
    mains, _ = apportion.main_classes(np.array(sizes), users)
    loads = [sum(sizes[i] for i in row) for row in mains]
    spread = sum(load**2 for load in loads)
    for a, b in itertools.permutations(range(users), 2):
        for give in mains[a]:
            for take in [*mains[b], None]:
                moved = list(loads)
                change = sizes[give] - (0 if take is None else sizes[take])
                moved[a] -= change
                moved[b] += change
                if take is None and len(mains[a]) == 1:
                    continue
                assert sum(load**2 for load in moved) >= spread


@given(sizes=st.lists(st.integers(20, 500), min_size=2, max_size=5), users=st.integers(2, 14))
def test_no_user_moved_between_classes_brings_sizes_closer(sizes: list[int], users: int) -> None:
    users = max(users, len(sizes))
    _, sharers = apportion.main_classes(np.array(sizes), users)
    for i, j in itertools.permutations(range(len(sizes)), 2):
        if sharers[j] > 1:
            now = abs(sizes[i] / sharers[i] - sizes[j] / sharers[j])
            then = abs(sizes[i] / (sharers[i] + 1) - sizes[j] / (sharers[j] - 1))
            assert then >= now - 1e-9


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1, 7, 300]),
)
def test_rounding_keeps_every_sum(rows: int, columns: int, seed: int, scale: int) -> None:
    # whole sums: a mean of whole matrices with equal sums is as general as they come
    generator = np.random.default_rng(seed)
    whole = generator.integers(0, scale + 1, (rows, columns))
    turned = whole.copy()
    for _ in range(20):
        i, k = generator.integers(0, rows, 2)
        j, m = generator.integers(0, columns, 2)
        if i != k and j != m and turned[i, j] and turned[k, m]:
            turned[i, j] -= 1
            turned[k, m] -= 1
            turned[i, m] += 1
            turned[k, j] += 1
    amounts = 0.3 * whole + 0.7 * turned
    rounded = apportion.round_to_sums(amounts)
    assert (rounded.sum(0) == whole.sum(0)).all()
    assert (rounded.sum(1) == whole.sum(1)).all()
    assert np.abs(rounded - amounts).max() < 1


@pytest.mark.parametrize("users", [1, 3, 10, 47])
def test_iid_is_stratified(users: int) -> None:
    labels = labels_of([100, 90, 80, 121])
    parts = split.iid(labels, users, 40)
    assert owners_once(parts, len(labels))
    counts = split.class_counts(labels, parts.users)
    assert (counts.max(0) - counts.min(0)).max() <= 1
    assert counts.sum(1).max() - counts.sum(1).min() <= 1


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_dirichlet_loses_nothing_and_small_alpha_is_more_skewed(alpha: float) -> None:
    labels = labels_of([500] * 10)
    parts = split.dirichlet(labels, 20, alpha, 100)
    assert owners_once(parts, len(labels))
    assert min(len(user) for user in parts.users) >= 10
    skew = split.measured_skew(labels, parts.users)
    low, high = {0.1: (0.6, 1), 1.0: (0.3, 0.6), 100.0: (0, 0.1)}[alpha]
    assert low < skew < high


@pytest.mark.parametrize(("users", "each"), [(5, 2), (10, 2), (20, 3), (7, 10), (100, 1)])
def test_shards_hold_exactly_that_many_classes(users: int, each: int) -> None:
    labels = labels_of([300] * 10)
    parts = split.shards(labels, users, each, 50)
    assert owners_once(parts, len(labels))
    counts = split.class_counts(labels, parts.users)
    assert ((counts > 0).sum(1) == each).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1


def test_mixtures_are_what_users_hold() -> None:
    labels = labels_of([200] * 4)
    table = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7]]
    parts = split.mixture(labels, 8, table)
    assert owners_once(parts, len(labels))
    counts = split.class_counts(labels, parts.users)
    assert counts[1].tolist() == counts[5].tolist() == [10, 70, 10, 10]


def test_labels_at_the_users_are_uniform_over_classes_and_stay_with_their_owners() -> None:
    labels = labels_of([100] * 5)
    before = split.skewed(labels, 10, 0.4, 50)
    parts = split.label_some(labels, before, 100, 7)
    assert owners_once(parts, len(labels))
    assert parts.labelled is not None
    for old, rest, marked in zip(before.users, parts.users, parts.labelled, strict=True):
        assert sorted([*rest, *marked]) == old.tolist()
    assert np.bincount(labels[np.concatenate(parts.labelled)]).tolist() == [20] * 5


def test_images_without_labels_are_dealt_evenly() -> None:
    labels = np.concatenate([labels_of([50, 50]), np.full(105, -1)])
    parts = split.skewed(labels[:100], 4, 1.0, 60)
    parts = split.deal_unlabelled(parts, np.arange(100, 205), 3)
    assert owners_once(parts, 205)
    unlabelled = [int((user >= 100).sum()) for user in parts.users]
    assert sorted(unlabelled) == [26, 26, 26, 27]


def test_validation_is_stratified_and_apart() -> None:
    labels = labels_of([100, 50, 30])
    held, rest = split.hold_out(labels, 0.1, 1)
    assert np.bincount(labels[held]).tolist() == [10, 5, 3]
    assert sorted([*held, *rest]) == list(range(180))


def test_held_out_groups_stay_together_and_single_images_are_held_out_as_before() -> None:
    draw = np.random.default_rng(0)
    labels = labels_of([100, 50, 30])
    alone = split.hold_out(labels, 0.1, 1, np.arange(180))[0]
    assert (alone == split.hold_out(labels, 0.1, 1)[0]).all()
    for _ in range(20):
        groups = draw.integers(0, 40, 180)
        held, rest = split.hold_out(labels, 0.2, 1, groups)
        assert sorted([*held, *rest]) == list(range(180))
        assert not set(groups[held]) & set(groups[rest])
        assert np.abs(np.bincount(labels[held]) - [20, 10, 6]).sum() <= 9


@pytest.mark.parametrize("kind", [np.uint8, np.int32, list])
def test_labels_of_any_kind_and_classes_without_images(kind: type) -> None:
    labels = np.array([0, 1, 3] * 30)
    given = labels.tolist() if kind is list else labels.astype(kind)
    parts = split.skewed(given, 4, 1.0, 0, np.int64(8))  # type: ignore[arg-type]
    assert owners_once(parts, 90)
    assert sorted(len(user) for user in parts.users) == [15, 15, 30, 30]
    assert split.measured_skew(given, parts.users) == pytest.approx(5 / 6)


def test_a_split_is_a_function_of_its_seed() -> None:
    labels = labels_of([60] * 5)
    one, same, other = (split.skewed(labels, 7, 0.5, 25, seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one.users, same.users, strict=True))
    assert (one.server == same.server).all()
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(one.users, other.users, strict=True))


@pytest.mark.parametrize(
    ("make", "key", "value", "fix"),
    [
        (lambda y: split.skewed(y, 3, 1.5), "split.skew", 1.5, None),
        (lambda y: split.skewed(y, 3, 0.4, 40), "split.server_labels", 40, "split.server_labels=20"),
        (lambda y: split.skewed(y, 3, 0.4, 22), "split.server_labels", 22, "split.server_labels=20"),
        (lambda y: split.skewed(y, 0, 0.4), "split.users", 0, None),
        (lambda y: split.iid(y, 0), "split.users", 0, None),
        (lambda y: split.skewed(y, 3, 0.4, -4), "split.server_labels", -4, None),
        (lambda y: split.dirichlet(y, 3, 0.0), "split.alpha", 0.0, None),
        (lambda y: split.shards(y, 3, 5), "split.classes_per_user", 5, None),
        (lambda y: split.shards(np.repeat(range(9), 10), 2, 2), "split.users", 2, None),
        (lambda y: split.mixture(y, 3, [[1.0, 0.0]]), "split.mixtures", [[1.0, 0.0]], None),
        (lambda y: split.mixture(y, 3, [[1.0]]), "split.mixtures", [[1.0]], None),
        (lambda y: split.iid(np.full(5, -1), 2), None, None, None),
    ],
)  # fmt: skip
def test_impossible_splits_say_what_to_change(
    make: object, key: str | None, value: object, fix: str | None
) -> None:
    labels = labels_of([12, 10])
    with pytest.raises(ConfigError) as caught:
        make(labels)  # type: ignore[operator]
    assert (caught.value.key, caught.value.value, caught.value.fix) == (key, value, fix)
