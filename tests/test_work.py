"""The local work: batches, views and losses are functions of their names alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssfl.core import draws
from ssfl.core.losses import Losses
from ssfl.core.step import evaluated, with_own_labels
from ssfl.engines.recording import run_without_kernels_if_they_fail
from ssfl.engines.work import Pool, Work, each_batch, make_batch, positions, round_keys
from ssfl.errors import SsflWarning
from ssfl.federation import Batch, Method, Named, Step
from ssfl.methods import parts
from ssfl.methods.self_training import SelfTraining
from ssfl.models.kernels import convolution

POOL = Pool(
    torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
    torch.arange(50) % 10, torch.tensor([0.5]), torch.tensor([0.25]), False, torch.float64,
)  # fmt: skip


def work(trainers: list[int], views: tuple[str, ...] = ("weak", "strong"), round: int = 3) -> Work:
    batches = torch.stack([(torch.arange(12) * 7 + t).reshape(3, 4) % 50 for t in trainers])
    return Work("user", views, round_keys(1, round, torch.tensor(trainers)), batches, None, (0.1,) * 3)


def strong_views(work: Work, step: int) -> torch.Tensor:
    strong = make_batch(POOL, work, step).strong
    assert strong is not None
    return strong


@given(sizes=st.lists(st.integers(1, 70), min_size=1, max_size=5), passes=st.integers(0, 3))
def test_batches_are_cut_from_fresh_permutations(sizes: list[int], passes: int) -> None:
    users = torch.arange(len(sizes)) + 4
    for user, size in enumerate(sizes):
        places = positions(9, users, torch.tensor(sizes), passes * size, size)[user]
        assert sorted(places.tolist()) == list(range(size))


def test_a_batch_runs_on_into_the_next_permutation_and_serves_users_with_few_images() -> None:
    sizes, users = torch.tensor([3, 100]), torch.tensor([0, 1])
    whole = positions(9, users, sizes, 0, 64)
    assert whole.shape == (2, 64)
    parts = [positions(9, users, sizes, start, 16) for start in range(0, 64, 16)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert whole[0].bincount().tolist() == [22, 21, 21] or set(whole[0].bincount().tolist()) == {21, 22}
    alone = positions(9, users[1:], sizes[1:], 0, 64)
    assert torch.equal(alone[0], whole[1])


def test_permutations_are_as_even_as_chance() -> None:
    # every image lands in every place equally often, and neighbours are not remembered
    count, size = 20_000, 6
    users = torch.arange(count)
    orders = positions(1, users, torch.full((count,), size), 0, size).numpy()
    for place in range(size):
        shares = np.bincount(orders[:, place], minlength=size) / count
        assert np.abs(shares - 1 / size).max() < 0.012
    pairs = np.bincount(orders[:, 0] * size + orders[:, 1], minlength=size**2)[[1, 9, 20, 33]] / count
    assert np.abs(pairs - 1 / 30).max() < 0.006
    whole = len({tuple(order) for order in orders.tolist()})
    assert whole == 720


@pytest.mark.parametrize("step", [0, 2])
def test_views_do_not_depend_on_who_else_trains(step: int) -> None:
    together = make_batch(POOL, work([3, 7, 9]), step)
    alone = make_batch(POOL, work([7]), step)
    for a, b in zip(tensors(together), tensors(alone), strict=True):
        assert torch.equal(a[1], b[0])


def test_a_method_that_somebody_adds_has_strong_views_and_one_that_says_so_has_none() -> None:
    assert torch.equal(strong_views(work([3], Method().uses()), 0), strong_views(work([3]), 0))
    assert make_batch(POOL, work([3], SelfTraining().uses()), 0).strong is None


@pytest.mark.parametrize("at_once", [1, 8, 20, 4096])
def test_views_of_several_steps_at_once_are_the_same(at_once: int) -> None:
    some = replace(work([3, 7, 9]), labelled=work([1, 2, 3]).batches)
    other = some.batches.flip(2)
    given = {
        "labels": other % 10,
        "mask": (other % 2).double(),
        "partner_labels": other % 7,
        "share": other[:, :, 0] / 10,
        "certain": (other % 3).double(),
    }
    sent = {"sent": other[:, 0, 0].double()}
    for wanted in (some, replace(some, tensors=given, extra_images={"partner": other}, sent=sent)):
        batches = list(each_batch(POOL, wanted, at_once))
        assert len(batches) == wanted.steps
        for step, batch in enumerate(batches):
            again = make_batch(POOL, wanted, step)
            assert list(batch.tensors) == list(again.tensors)
            pairs = list(zip(tensors(batch), tensors(again), strict=True))
            assert len(pairs) == (14 if wanted.tensors else 7)
            assert all(torch.equal(a, b) for a, b in pairs)


def tensors(batch: Batch) -> list[torch.Tensor]:
    *parts, given = batch
    return [part for part in (*parts, *given.values()) if isinstance(part, torch.Tensor)]


def test_views_differ_between_rounds_users_and_steps() -> None:
    same = torch.zeros(2, 3, 4, dtype=torch.int64)
    base = work([3, 7])
    base = replace(base, batches=same)
    strong = strong_views(base, 0)
    assert not torch.equal(strong[0], strong[1])
    assert not torch.equal(strong, strong_views(base, 1))
    later = replace(base, keys=work([3, 7], round=4).keys)
    assert not torch.equal(strong, strong_views(later, 0))


def test_the_loss_is_a_mean_over_the_batch_with_masked_images_as_zeros() -> None:
    # a network that is sure of bright images alone
    def network(
        weights: Named, buffers: Named, images: torch.Tensor, training: bool, keys: torch.Tensor
    ) -> tuple[torch.Tensor, Named]:
        bright = images.mean((2, 3, 4))
        return torch.stack([20 * bright, torch.zeros_like(bright)], 2), buffers

    def consistency(step: Step) -> Losses:
        return parts.consistency(step, 0.9)

    batch = make_batch(POOL, work([1]), 0)
    step = Step(batch, {}, {}, network)
    loss, metrics, _ = evaluated(consistency, step)
    weak, strong = (network({}, {}, views, True, batch.keys)[0][0] for views in (step.weak, step.strong))
    sure = [torch.softmax(logits, 0).max() >= 0.9 for logits in weak]
    each = torch.nn.functional.cross_entropy(strong, weak.argmax(1), reduction="none")
    expected = sum(float(value) for value, counts in zip(each, sure, strict=True) if counts) / 4
    assert float(loss) == pytest.approx(expected)
    assert float(metrics["mask_rate"]) == pytest.approx(sum(map(bool, sure)) / 4)


def test_labelled_images_of_users_add_their_own_loss() -> None:
    def network(
        weights: Named, buffers: Named, images: torch.Tensor, training: bool, keys: torch.Tensor
    ) -> tuple[torch.Tensor, Named]:
        return torch.zeros(*images.shape[:2], 10, dtype=torch.float64), buffers

    base = work([1, 2])
    labelled = base.batches.clone()
    labelled[1] = -1  # the second user has none
    batch = make_batch(POOL, replace(base, labelled=labelled), 0)
    losses = evaluated(with_own_labels(Method().user_loss), Step(batch, {}, {}, network))[0]
    assert losses.tolist() == pytest.approx([np.log(10), 0])


def test_the_server_has_a_name_of_its_own() -> None:
    keys = {draws.key(1, "weak", 0, user) for user in (draws.SERVER, *range(100))}
    assert len(keys) == 101


def test_kernels_are_blamed_only_if_a_step_works_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_use", True)

    def needs_plain_layers() -> None:
        if convolution.usable():
            raise RuntimeError("no C compiler")

    def broken() -> None:
        raise ZeroDivisionError("kernels" if convolution.usable() else "plain layers")

    with pytest.raises(ZeroDivisionError, match="kernels"):  # the first error, not that of the second run
        run_without_kernels_if_they_fail(broken)
    assert convolution.usable()
    with pytest.warns(SsflWarning):
        run_without_kernels_if_they_fail(needs_plain_layers)
    assert not convolution.usable()
