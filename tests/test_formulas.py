"""The paper's formulas against hand-computed cases and independent readings."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssfl.core import averaging, diversity, losses, schedule
from ssfl.federation import Batch, Named, Step
from ssfl.methods.self_training import SelfTraining

ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [7.0, 2.0]], dtype=torch.float64)
SERVER = torch.tensor([10.0, -2.0], dtype=torch.float64)


def random_rows(count: int, seed: int, length: int = 6) -> torch.Tensor:
    return torch.randn(count, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# averaging


def test_fedavg_by_hand() -> None:
    assert averaging.fedavg(SERVER, ROWS).tolist() == pytest.approx([26 / 5, 6 / 5])
    assert averaging.fedavg(None, ROWS).tolist() == pytest.approx([4, 2])


def test_grouping_by_hand() -> None:
    streams, average = averaging.grouping(SERVER, ROWS, [[0, 3], [1, 2]])
    assert streams[0].tolist() == pytest.approx([18 / 3, 2 / 3])
    assert streams[1].tolist() == pytest.approx([18 / 3, 2 / 3])
    streams, average = averaging.grouping(SERVER, ROWS, [[0], [1, 2, 3]])
    assert streams[0].tolist() == pytest.approx([5.5, 0])
    assert streams[1].tolist() == pytest.approx([25 / 4, 1])
    assert average.tolist() == pytest.approx([(5.5 + 6.25) / 2, 0.5])


def test_rows_may_be_arrays_or_lists_and_groups_anything_that_counts() -> None:
    expected = averaging.fedavg(SERVER, ROWS).tolist()
    for kind in (torch.Tensor.tolist, torch.Tensor.numpy, list):
        server = SERVER if kind is list else kind(SERVER)
        assert averaging.fedavg(server, kind(ROWS)).tolist() == pytest.approx(expected)
    assert averaging.fedavg([1, 2], [[3, 4]]).tolist() == [2, 3]
    streams, _ = averaging.grouping(SERVER, ROWS, [np.array([0, 3]), torch.tensor([1, 2])])
    assert streams[0].tolist() == pytest.approx([18 / 3, 2 / 3])
    assert diversity.gradient_diversity(np.eye(3)) == pytest.approx(1)
    for groups in ([[0], [1]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3], [3]]):
        with pytest.raises(ValueError, match="groups"):
            averaging.grouping(SERVER, ROWS, groups)
    with pytest.raises(ValueError, match="users"):
        averaging.fedavg(None, ROWS[:0])


def test_a_group_that_nobody_came_back_from() -> None:
    streams, _ = averaging.grouping(SERVER, ROWS, [[0, 1, 2, 3], []])
    assert streams[1].tolist() == SERVER.tolist()
    streams, _ = averaging.grouping(None, ROWS, [[0, 1, 2, 3], []])
    assert streams[1].tolist() == pytest.approx([4, 2])


def test_server_weight_by_hand() -> None:
    assert averaging.weighted(SERVER, ROWS, 0.5).tolist() == pytest.approx([7, 0])
    assert averaging.weighted(SERVER, ROWS, 1.0).tolist() == SERVER.tolist()


@given(
    users=st.integers(1, 9), groups=st.integers(1, 4), seed=st.integers(0, 999), server=st.booleans(),
    weight=st.none() | st.floats(0, 1),
)  # fmt: skip
def test_every_average_is_convex_and_the_same_for_equal_rows(
    users: int, groups: int, seed: int, server: bool, weight: float | None
) -> None:
    generator = np.random.default_rng(seed)
    member = generator.integers(0, groups, users)
    dealt = [np.flatnonzero(member == g).tolist() for g in range(groups)]
    matrix = averaging.mixing(dealt, server, weight)
    assert (matrix >= 0).all()
    assert matrix.sum(1).tolist() == pytest.approx([1] * groups)
    rows = random_rows(users, seed)
    own = random_rows(1, seed + 1)[0] if server else None
    streams, average = averaging.average(own, rows, matrix)
    everyone = rows if own is None else torch.cat([own[None], rows])
    low, high = everyone.min(0).values - 1e-12, everyone.max(0).values + 1e-12
    assert ((streams >= low) & (streams <= high)).all()
    assert ((average >= low) & (average <= high)).all()


@given(users=st.integers(1, 9), seed=st.integers(0, 99))
def test_grouping_of_one_group_is_fedavg(users: int, seed: int) -> None:
    rows, own = random_rows(users, seed), random_rows(1, seed + 1)[0]
    _, average = averaging.grouping(own, rows, [list(range(users))])
    torch.testing.assert_close(average, averaging.fedavg(own, rows))


# the learning rate


@pytest.mark.parametrize(
    ("epochs", "base", "warmup", "cycles", "last"),
    [
        # CIFAR-10: E=300, e=5, c=2.3: at the floor from epoch 70 to 197, and then it rises again
        (300, 0.146, 5, 2.3, 0.146 * math.cos(2.3 * math.pi)),
        (40, 0.146, 5, 2.3, 0.146 * math.cos(2.3 * math.pi)),
        (100, 0.03, 0, 0.4375, 0.03 * math.cos(0.4375 * math.pi)),
    ],
)
def test_the_papers_rate_ends_where_its_formula_says(
    epochs: int, base: float, warmup: int, cycles: float, last: float
) -> None:
    steps = epochs * 1024

    def rate(epoch: float) -> float:
        return schedule.learning_rate(
            epoch * 1024, base=base, steps=steps, warmup=warmup * 1024, cycles=cycles, floor=1e-4
        )

    assert rate(epochs) == pytest.approx(last)
    assert rate(warmup) == base
    if cycles > 2:
        # cos(2.3π) = cos(0.3π): the end is at 0.588 of the base rate, above the floor before it
        assert last == pytest.approx(0.5878 * base, rel=1e-4)
        assert rate(warmup + (epochs - warmup) / 2.3) == pytest.approx(1e-4 * base)
        assert rate(warmup + (epochs - warmup) * 2 / 2.3) == pytest.approx(base)


def test_warm_up_is_a_line_from_zero() -> None:
    rates = [schedule.learning_rate(t, base=2.0, steps=100, warmup=4) for t in range(5)]
    assert rates == pytest.approx([0, 0.5, 1, 1.5, 2])


# losses


def test_the_consistency_loss_by_hand() -> None:
    weak = torch.tensor([[4.0, 0, 0], [0.1, 0, 0], [0, 0, 5.0]])
    strong = torch.tensor([[1.0, 2, 3], [1, 1, 1], [0, 0, 1.0]])
    found = losses.consistency(weak, strong, 0.95)
    assert found.label.tolist() == [0, 0, 2]
    assert found.mask.tolist() == [1, 0, 1]
    first = math.log(math.e + math.e**2 + math.e**3) - 1
    third = math.log(2 + math.e) - 1
    assert found.loss.tolist() == pytest.approx([first, 0, third], rel=1e-6)


def test_the_threshold_counts_from_equality_and_pseudo_labels_carry_no_gradient() -> None:
    weak = torch.zeros(1, 2, requires_grad=True)
    strong = torch.zeros(1, 2, requires_grad=True)
    assert losses.consistency(weak, strong, 0.5).mask.tolist() == [1]
    assert losses.consistency(weak, strong, 0.500001).mask.tolist() == [0]
    losses.consistency(weak, strong, 0.5).loss.sum().backward()
    assert weak.grad is None
    assert strong.grad is not None
    assert strong.grad.tolist() == [[-0.5, 0.5]]


@pytest.mark.parametrize("views", ["joint", "separate"])
def test_self_training_and_supervised_by_hand(views: str) -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, 0.2]])

    def network(
        weights: Named, buffers: Named, images: torch.Tensor, training: bool, keys: torch.Tensor
    ) -> tuple[torch.Tensor, Named]:
        return images, buffers  # a view is what the network says of it

    unknown, shares = torch.full((1, 2), -1), torch.full((1, 2), 0.5)
    keys = torch.zeros(1, dtype=torch.int64)
    batch = Batch(logits[None], None, unknown, None, None, keys, shares, {})
    found = SelfTraining(threshold=0.9, views=views).user_loss(Step(batch, {}, {}, network))
    assert found.mask.tolist() == [[1, 0]]
    assert found.loss[0].tolist() == pytest.approx([math.log(1 + math.exp(-3)), 0], rel=1e-5)
    assert torch.equal(found.loss[0], losses.consistency(logits, logits, 0.9).loss)
    known = losses.supervised(logits, torch.tensor([1, 0]))
    expected = [math.log(1 + math.exp(3)), math.log(1 + math.exp(0.2))]
    assert known.loss.tolist() == pytest.approx(expected, rel=1e-6)


# gradient diversity


def by_numpy(rows: np.ndarray, order: int, squared: bool) -> float:
    power = 2 if squared else 1
    norms = [np.linalg.norm(row, order) ** power for row in rows]
    return float(sum(norms) / np.linalg.norm(rows.sum(0), order) ** power)


@given(
    count=st.integers(1, 8), seed=st.integers(0, 999), order=st.sampled_from([1, 2]), squared=st.booleans()
)
def test_diversity_is_its_definition(count: int, seed: int, order: int, squared: bool) -> None:
    rows = random_rows(count, seed)
    value = diversity.gradient_diversity(rows, order, squared)
    assert value == pytest.approx(by_numpy(rows.numpy(), order, squared), rel=1e-9)
    mean = np.linalg.norm(rows.numpy().mean(0), order)
    ratios = [(np.linalg.norm(row, order) / mean) ** (2 if squared else 1) for row in rows.numpy()]
    assert diversity.authors_diversity(rows, order, squared) == pytest.approx(np.mean(ratios), rel=1e-9)


def test_diversity_of_equal_orthogonal_and_cancelling_gradients() -> None:
    assert diversity.gradient_diversity(torch.ones(5, 3)) == pytest.approx(1 / 5)
    assert diversity.gradient_diversity(torch.eye(5)) == pytest.approx(1)
    assert math.isnan(diversity.gradient_diversity(torch.zeros(3, 2)))
    assert math.isinf(diversity.gradient_diversity(torch.tensor([[1.0], [-1.0]])))


def test_all_sixteen_variants_over_everybody_and_within_groups() -> None:
    users = {"gradient": random_rows(5, 1), "update": random_rows(5, 2)}
    server: dict[str, torch.Tensor | None] = {
        "gradient": random_rows(1, 3)[0],
        "update": random_rows(1, 4)[0],
    }
    groups = [[0, 4], [1, 2, 3], []]
    table = diversity.variants(users, server, groups)
    assert len(table) == 16
    for kind in users:
        for order in (1, 2):
            for squared in (False, True):
                for own in (False, True):
                    name = f"{kind}_l{order}{'_squared' * squared}{'_server' * own}"
                    extra = server[kind]
                    assert extra is not None
                    head = extra[None].numpy() if own else np.zeros((0, 6))
                    rows = users[kind].numpy()
                    whole = by_numpy(np.concatenate([head, rows]), order, squared)
                    assert table[name]["definition"] == pytest.approx(whole, rel=1e-9)
                    count = 5 + own
                    assert table[name]["authors"] == pytest.approx(
                        whole * (count if squared else 1), rel=1e-9
                    )
                    # the authors: every member's ratio within its group, then the mean over members
                    ratios = []
                    for group in groups[:2]:
                        members = np.concatenate([head, rows[group]])
                        mean = np.linalg.norm(members.mean(0), order)
                        value = np.mean([(np.linalg.norm(m, order) / mean) ** (1 + squared) for m in members])
                        ratios += [value] * len(group)
                    assert table[name]["authors_groups"] == pytest.approx(np.mean(ratios), rel=1e-9)


def test_undefined_diversity_is_none() -> None:
    table = diversity.variants({"gradient": torch.zeros(2, 3)}, {}, [[0, 1]])
    assert table["gradient_l2_squared"] == dict.fromkeys(
        ["definition", "authors", "definition_groups", "authors_groups"]
    )
