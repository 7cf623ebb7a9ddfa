"""Intervals, paired differences and calibration against scipy, scikit-learn and hand-made cases."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_rel
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, roc_auc_score

from ssfl.core import statistics


@pytest.mark.parametrize(("right", "count"), [(0, 5), (1, 12), (10, 12), (12, 12), (203, 237), (999, 1000)])
def test_wilson_is_scipys(right: int, count: int) -> None:
    theirs = binomtest(right, count).proportion_ci(method="wilson")
    assert statistics.wilson(right, count) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_wilson_of_nothing_says_nothing() -> None:
    assert statistics.wilson(0, 0) == (0, 1)


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (5, 0), (12, 2), (3, 3), (30, 17)])
def test_mcnemar_is_a_binomial_test(won: int, lost: int) -> None:
    p = binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert statistics.mcnemar(won, lost) == pytest.approx(p, abs=1e-12)


def test_mcnemar_is_the_sum_of_binomial_coefficients() -> None:
    for total in range(1, 40):
        for won in range(total + 1):
            tail = sum(math.comb(total, k) for k in range(min(won, total - won) + 1))
            assert statistics.mcnemar(won, total - won) == min(1.0, 2 * tail / 2**total)
    assert statistics.mcnemar(24_800, 25_200) == pytest.approx(binomtest(24_800, 50_000).pvalue, rel=1e-9)


def test_paired_interval_is_the_published_one() -> None:
    """Newcombe 1998 (Statistics in Medicine 17: 2635-2650), method 10, of the table 36, 12, 2, 0."""
    assert statistics.paired_interval(50, 48, 38, 12, 2) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_paired_interval_by_hand_where_two_models_never_agree() -> None:
    """5 images, 2 right alone and 3 wrong alone: phi is -1, and both ends are plain sums."""
    a, b = statistics.wilson(2, 5), statistics.wilson(3, 5)
    low = -0.2 - ((0.4 - a.low) + (b.high - 0.6))
    high = -0.2 + ((0.6 - b.low) + (a.high - 0.4))
    assert statistics.paired_interval(5, 2, 3, 2, 3) == pytest.approx((max(low, -1), min(high, 1)))


def test_a_paired_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    shares, truth, count = [0.6, 0.2, 0.1, 0.1], 0.1, 60  # both right, first alone, second alone, neither
    held = 0
    for both, won, lost, _ in draw.multinomial(count, shares, size=2000):
        low, high = statistics.paired_interval(count, both + won, both + lost, won, lost)
        held += low <= truth <= high
    assert 0.93 <= held / 2000 <= 0.98


def test_pairs_are_counted() -> None:
    pair = statistics.paired([True, True, False, False, True], [True, False, True, False, False])
    assert pair == statistics.Paired(5, 3, 2, 2, 1)
    assert pair.difference == pytest.approx(0.2)
    turned = statistics.paired([True, False, True, False, False], [True, True, False, False, True])
    assert turned.interval == pytest.approx((-pair.interval.high, -pair.interval.low))
    assert pair.p == 1.0


def test_the_interval_of_a_difference_over_seeds_is_scipys() -> None:
    """Seeds that only one of the two has are left out."""
    ours, theirs = {1: 90.0, 2: 92.0, 3: 94.0, 4: 1.0}, {0: 2.0, 1: 89.0, 2: 93.0, 3: 91.0}
    apart = statistics.mean_difference(ours, theirs)
    test = ttest_rel([90, 92, 94], [89, 93, 91]).confidence_interval(0.95)
    assert apart is not None
    assert apart.mean == pytest.approx(1)
    assert apart.interval == pytest.approx((test.low, test.high))
    assert statistics.mean_difference({1: 90.0}, {2: 90.0}) is None


@pytest.mark.parametrize("ours", [{1: 90.0}, {1: 90.3, 2: 80.3}, {1: 90.3, 2: 80.3, 3: 70.3}])
def test_one_seed_and_equal_differences_have_no_interval(ours: dict[int, float]) -> None:
    theirs = {seed: accuracy - 100 / 360 for seed, accuracy in ours.items()}  # they differ by rounding
    apart = statistics.mean_difference(ours, theirs)
    assert apart is not None
    assert apart.mean == pytest.approx(100 / 360)
    assert apart.half is None
    assert apart.interval is None
    assert statistics.accuracy_interval([90.0] * len(ours)) is None


def test_the_interval_of_an_accuracy_ends_at_100_percent() -> None:
    """Student's t of two degrees of freedom is 4.303."""
    interval = statistics.accuracy_interval([95.3, 96.7, 89.7])
    half = 4.30265 * (((95.3 - 93.9) ** 2 + (96.7 - 93.9) ** 2 + (89.7 - 93.9) ** 2) / 2 / 3) ** 0.5
    assert interval == pytest.approx((93.9 - half, 100), abs=1e-4)


def test_balanced_accuracy_and_confusion_are_scikit_learns() -> None:
    draw = np.random.default_rng(1)
    labels, guesses = draw.integers(0, 3, 50), draw.integers(0, 3, 50)
    matrix = statistics.confusion(labels.tolist(), guesses.tolist(), 3)
    assert matrix == confusion_matrix(labels, guesses).tolist()
    each = statistics.class_accuracies(matrix)
    assert statistics.balanced(each) == pytest.approx(balanced_accuracy_score(labels, guesses))
    assert statistics.balanced([*each, None]) == statistics.balanced(each)  # a class without images
    assert statistics.balanced([None]) is None
    assert statistics.class_accuracies([[3, 1], [0, 0]]) == [0.75, None]


def test_classes_are_uneven_when_one_is_far_larger() -> None:
    assert statistics.is_uneven([10, 20])
    assert statistics.is_uneven([10, 0, 16])
    assert not statistics.is_uneven([10, 15])
    assert not statistics.is_uneven([10, 0])


def test_calibration_by_hand() -> None:
    confidence, right = [0.55, 0.57, 0.95, 1.0], [True, False, True, True]
    bins = statistics.reliability(confidence, right)
    assert [one.count for one in bins] == [0, 0, 0, 0, 0, 2, 0, 0, 0, 2]
    assert bins[5].confidence == pytest.approx(0.56)
    assert bins[5].accuracy == 0.5
    assert (bins[9].low, bins[9].high, bins[9].accuracy) == (0.9, 1.0, 1.0)
    assert bins[9].confidence == pytest.approx(0.975)
    assert bins[0].accuracy is None
    assert statistics.calibration_error(bins) == pytest.approx((2 * 0.06 + 2 * 0.025) / 4)
    assert statistics.calibration_error(statistics.reliability([], [])) is None
    assert math.isclose(sum(one.high - one.low for one in bins), 1)


@pytest.mark.parametrize(("few", "many", "levels"), [(2, 3, 4), (7, 40, 10), (30, 31, 1000)])
def test_the_area_under_roc_is_scikit_learns_and_its_interval_delongs(
    few: int, many: int, levels: int
) -> None:
    draw = np.random.default_rng(few)
    first, second = (
        draw.integers(0, levels, many) / levels,
        draw.integers(levels // 3, levels + 1, few) / levels,
    )
    area, interval = statistics.auroc(first.tolist(), second.tolist())
    truth = [0] * many + [1] * few
    assert area == pytest.approx(roc_auc_score(truth, [*first, *second]))
    wins = (second[:, None] > first) + 0.5 * (second[:, None] == first)
    variance = wins.mean(1).var(ddof=1) / few + wins.mean(0).var(ddof=1) / many
    assert interval is not None
    logit = math.log(area / (1 - area))
    half = 1.959964 * math.sqrt(variance) / (area * (1 - area))
    assert [math.log(end / (1 - end)) for end in interval] == pytest.approx([logit - half, logit + half])


def test_the_interval_of_the_area_has_the_true_area_in_95_of_100_cases() -> None:
    draw = np.random.default_rng(1)
    true = 0.5 * (1 + math.erf(0.5))  # normal scores with means one standard deviation apart: Φ(1 / √2)
    inside = 0
    for _ in range(1000):
        _, interval = statistics.auroc(draw.normal(0, 1, 40).tolist(), draw.normal(1, 1, 60).tolist())
        assert interval is not None
        inside += interval.low < true < interval.high
    assert 930 <= inside <= 970


def test_classes_that_scores_separate_have_an_area_without_interval() -> None:
    assert statistics.auroc([0.1, 0.2], [0.3, 0.9]) == (1.0, None)
    assert statistics.auroc([0.3, 0.9], [0.1, 0.2]) == (0.0, None)
    assert statistics.auroc([0.5, 0.5], [0.5, 0.5]) == (0.5, None)
    assert statistics.auroc([0.5], [0.1, 0.9]) == (0.5, None)
