"""The GPU kernels for views and random numbers against plain PyTorch, byte for byte. Without a GPU, but with
Triton installed, its interpreter runs them."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ssfl.core import draws
from ssfl.data import augment, gentle
from ssfl.engines.work import SHUFFLE_ROUNDS, Pool, Work, make_batch, positions, round_keys
from ssfl.models.kernels import views

ON_GPU = torch.cuda.is_available()
if not ON_GPU and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which no test on a CPU does

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
DEVICE = "cuda" if ON_GPU else "cpu"
VIEWS = 2000 if ON_GPU else 40


def pictures(count: int, channels: int, height: int, width: int) -> Tensor:
    """Images with smooth areas, noise, a single grey level, and few grey levels."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(count, channels, height // 4 + 1, width // 4 + 1, generator=generator)
    bright = torch.randint(20, 256, (count, 1, 1, 1), generator=generator)
    images = (F.interpolate(coarse, size=(height, width), mode="bilinear") * bright).to(torch.uint8)
    noise = torch.randint(0, 256, images[:3].shape, generator=generator, dtype=torch.uint8)
    images[:3], images[3], images[4] = noise, 7, images[4] // 90 * 90
    return images


@pytest.mark.parametrize("view", [augment.WEAK, augment.STRONG])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (3, 20, 37), (3, 64, 64)])
def test_views_have_the_same_bytes(shape: tuple[int, int, int], flip: bool, view: augment.View) -> None:
    images, channels = pictures(20, *shape), shape[0]
    indices = torch.arange(VIEWS) * 7 % 21 - 1  # also -1, as for a user without images
    keys = draws.fold(torch.tensor(draws.key(3, "strong", shape[1])), torch.arange(VIEWS))
    mean, std = torch.tensor([0.49, 0.48, 0.45][:channels]), torch.tensor([0.24, 0.26, 0.27][:channels])
    expected = view.make(images[indices], draws.bits(keys, view.draws), flip)
    # the interpreter rounds to bfloat16 in its own way
    for dtype in (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,):
        ours = views.make(
            view, images.to(DEVICE), indices.to(DEVICE), keys.to(DEVICE), flip,
            mean.to(DEVICE), std.to(DEVICE), dtype,
        )  # fmt: skip
        assert torch.equal(ours.cpu(), augment.normalise(expected, mean, std, dtype))


@pytest.mark.parametrize("first", [0, 10_000_000_000, torch.tensor([[3], [50], [7], [1]])])
def test_users_see_their_images_in_the_same_order(first: int | Tensor) -> None:
    trainers, sizes = torch.tensor([4, 0, 9, -1]), torch.tensor([5, 1, 40, 70_000])
    base = draws.key(1, "batches", 2)
    place = first.to(DEVICE) if isinstance(first, Tensor) else first
    ours = views.positions(base, trainers.to(DEVICE), sizes.to(DEVICE), place, 300, SHUFFLE_ROUNDS)
    assert torch.equal(ours.cpu(), positions(base, trainers, sizes, first, 300))
    nobody = trainers[:0].to(DEVICE)
    assert views.positions(base, nobody, nobody, 0, 300, SHUFFLE_ROUNDS).shape == (0, 300)


@pytest.mark.parametrize("kinds", [("weak", "strong"), ("mixed",)])
def test_a_batch_has_the_same_bytes(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with labelled images at the users, further images for mixup, and a step that is a tensor."""
    generator = torch.Generator().manual_seed(2)

    def chosen() -> Tensor:
        return torch.randint(0, 20, (2, 3, 4), generator=generator).to(DEVICE)

    mean, std = torch.tensor([0.5, 0.4, 0.3], device=DEVICE), torch.tensor([0.25, 0.2, 0.3], device=DEVICE)
    labels = (torch.arange(20) % 10).to(DEVICE)
    images = pictures(20, 3, 16, 16).to(DEVICE)
    pool = Pool(images, labels, mean, std, True, torch.bfloat16, kernels=True)
    keys = round_keys(1, 3, torch.tensor([3, -1], device=DEVICE))
    extra = {"partner": chosen(), "second": chosen()}
    labelled = chosen()
    labelled[1] = -1
    work = Work("user", kinds, keys, chosen(), labelled, (0.1,) * 3, extra_images=extra)
    step = torch.tensor([2], device=DEVICE)
    monkeypatch.setattr(views, "suit", lambda *_: True)
    ours, by_number = make_batch(pool, work, step), make_batch(pool, work, 2)
    monkeypatch.setattr(views, "suit", lambda *_: False)
    plain = make_batch(pool, work, step)
    tolerance = 0.01 if not ON_GPU else 1e-6
    for batch in (ours, by_number):
        for name in ("labels", "own_labels", "keys", "shares"):
            assert torch.equal(getattr(batch, name), getattr(plain, name)), name
        made = {name: getattr(batch, name) for name in ("weak", "strong", "own")} | batch.tensors
        expected = {name: getattr(plain, name) for name in ("weak", "strong", "own")} | plain.tensors
        for name, value in made.items():
            if value is None:
                assert expected[name] is None
            else:
                assert torch.allclose(value.float(), expected[name].float(), rtol=tolerance), name


def test_indices_may_be_one_number_that_is_repeated() -> None:
    """As `Tensor.expand` repeats it, without memory for each."""
    images = pictures(20, 1, 8, 8).to(DEVICE)
    one = torch.full((1,), 6, dtype=torch.int64, device=DEVICE)
    keys, level = torch.arange(5, device=DEVICE), torch.ones(1, device=DEVICE)
    for view in (augment.WEAK, augment.STRONG):
        ours, expected = (
            views.make(view, images, indices, keys, True, level, level, torch.float32)
            for indices in (one.expand(5), one.repeat(5))
        )
        assert torch.equal(ours, expected)


def test_only_built_in_views_of_small_images_in_these_types_are_made_by_kernels() -> None:
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8, device=DEVICE)
    large = torch.zeros(1, 3, 96, 96, dtype=torch.uint8, device=DEVICE)
    assert views.suit(images, augment.STRONG, torch.bfloat16) == ON_GPU
    assert not views.suit(large, augment.WEAK, torch.bfloat16)
    assert not views.suit(images, augment.WEAK, torch.float64)
    assert not views.suit(images, gentle.GENTLE, torch.bfloat16)
