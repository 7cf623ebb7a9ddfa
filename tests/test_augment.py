"""Views of images: Pillow's operations byte for byte, own draws for every image, plain geometry."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from ssfl.core.draws import bits
from ssfl.data import augment
from ssfl.data.augment import (
    OPERATIONS,
    STRONG_DRAWS,
    WEAK_DRAWS,
    apply_operation,
    normalise,
    strong,
    strong_views,
    weak,
    weak_views,
)
from ssfl.data.operations import weight_table

SIZES = [(8, 8), (28, 28), (32, 32), (20, 37)]
PILLOW_BLEND = Image.blend  # the tests may put another in its place
GEOMETRIC = {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Batches here are so small that threads cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blended(one: Image.Image, two: Image.Image, factor: float, fused: bool = False) -> Image.Image:
    """Pillow's blend, its product rounded before the sum, as on x86-64, or fused with it, as on Arm."""
    work = np.dtype(np.float64 if fused else np.float32)  # the wider one holds product and sum whole
    first, second = (np.asarray(image).astype(work) for image in (one, two))
    mixed = first + (second - first) * np.float32(factor).astype(work)
    return Image.fromarray(mixed.astype(np.float32).astype(np.uint8))


def level_pairs() -> tuple[Image.Image, Image.Image]:
    level = np.arange(256, dtype=np.uint8)
    one, two = np.meshgrid(level, level)
    return Image.fromarray(one), Image.fromarray(two)


def pillow_blends(factor: float, fused: bool) -> bool:
    """Whether this machine's Pillow rounds so, for every pair of levels."""
    found, expected = PILLOW_BLEND(*level_pairs(), factor), blended(*level_pairs(), factor, fused)
    return found.tobytes() == expected.tobytes()


@pytest.fixture(scope="module", autouse=True)
def pillow_as_on_x86() -> Iterator[None]:
    """Views are the same bytes on every machine; Pillow's own, with one of nine factors, are not."""
    with pytest.MonkeyPatch.context() as patch:
        if not pillow_blends(0.86, fused=False):
            patch.setattr(Image, "blend", blended)
        yield


def random_images(n: int, c: int, h: int, w: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, c, h, w), dtype=np.uint8))


def draws_for(n: int, count: int, seed: int = 1) -> Tensor:
    return bits(torch.arange(n) + 1000 * seed, count)


def to_pillow(image: Tensor) -> Image.Image:
    array = image.numpy()
    return Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0).copy())


def from_pillow(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


# What each operation means, in Pillow's own words: v is the magnitude, s its sign.
PILLOW: dict[str, Callable[[Image.Image, int, int], Image.Image]] = {
    "AutoContrast": lambda image, v, s: ImageOps.autocontrast(image),
    "Brightness": lambda image, v, s: ImageEnhance.Brightness(image).enhance(0.05 + 0.09 * v),
    "Color": lambda image, v, s: ImageEnhance.Color(image).enhance(0.05 + 0.09 * v),
    "Contrast": lambda image, v, s: ImageEnhance.Contrast(image).enhance(0.05 + 0.09 * v),
    "Equalize": lambda image, v, s: ImageOps.equalize(image),
    "Identity": lambda image, v, s: image,
    "Posterize": lambda image, v, s: ImageOps.posterize(image, 4 + int(0.4 * v)),
    "Rotate": lambda image, v, s: image.rotate(s * 3 * v),
    "Sharpness": lambda image, v, s: ImageEnhance.Sharpness(image).enhance(0.05 + 0.09 * v),
    "ShearX": lambda image, v, s: affine(image, 1, s * 0.03 * v, 0, 0, 1, 0),
    "ShearY": lambda image, v, s: affine(image, 1, 0, 0, s * 0.03 * v, 1, 0),
    "Solarize": lambda image, v, s: ImageOps.solarize(image, 256 - int(25.6 * v)),
    "TranslateX": lambda image, v, s: affine(image, 1, 0, int(s * v * 0.3 / 10 * image.width), 0, 1, 0),
    "TranslateY": lambda image, v, s: affine(image, 1, 0, 0, 0, 1, int(s * v * 0.3 / 10 * image.height)),
}


def assert_like_pillow(name: str, images: Tensor) -> None:
    """Every image under every magnitude and sign, in one mixed batch, against Pillow one by one."""
    signs = (1, -1) if name in GEOMETRIC else (1,)
    cases = [(image, v, s) for image in images for v in range(1, 10) for s in signs]
    found = apply_operation(
        torch.stack([image for image, _, _ in cases]),
        torch.full((len(cases),), OPERATIONS.index(name)),
        torch.tensor([v for _, v, _ in cases]),
        torch.tensor([s < 0 for _, _, s in cases]),
    )
    for out, (image, v, s) in zip(found, cases, strict=True):
        expected = from_pillow(PILLOW[name](to_pillow(image), v, s))
        assert torch.equal(out, expected), (name, v, s, int((out != expected).sum()))


def test_the_pool_is_the_fourteen() -> None:
    assert len(OPERATIONS) == 14
    assert set(OPERATIONS) == set(PILLOW)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_pillows(name: str, channels: int, size: tuple[int, int]) -> None:
    images = random_images(4, channels, *size)
    images[1] = images[1] // 3 + 40  # a narrow range of levels, as AutoContrast meets it
    images[2] = images[2].sort(-1).values  # smooth in one direction, with a border that differs
    images[3] = (images[3].int() ** 2 // 255).to(torch.uint8)  # skewed, so Equalize has work
    assert_like_pillow(name, images)


def edge_cases(channels: int, h: int, w: int) -> Tensor:
    """Constant, two-valued and almost constant images, and a different case in each channel."""
    cases = [torch.full((h, w), level, dtype=torch.uint8) for level in (0, 1, 127, 254, 255)]
    for low, high in ((0, 255), (0, 1), (254, 255), (100, 101), (7, 200)):
        half = torch.full((h, w), low, dtype=torch.uint8)
        half[:, w // 2 :] = high
        cases.append(half)
        dot = torch.full((h, w), low, dtype=torch.uint8)
        dot[h // 2, w // 2] = high
        cases.append(dot)
    ramp = torch.arange(h * w).view(h, w)
    cases += [(ramp % 256).to(torch.uint8), (ramp * 255 // (h * w - 1)).to(torch.uint8)]
    stacked = torch.stack(cases)
    return torch.stack([stacked.roll(-c, 0) for c in range(channels)], 1)


@pytest.mark.parametrize("size", [(4, 4), (8, 8), (15, 17), (16, 16), (28, 28)], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "Contrast", "Sharpness", "Solarize"])
def test_edge_cases_are_pillows(name: str, channels: int, size: tuple[int, int]) -> None:
    assert_like_pillow(name, edge_cases(channels, *size))


def test_this_machines_pillow_rounds_in_one_of_two_ways() -> None:
    factors = [0.05 + 0.09 * v for v in range(1, 10)]
    assert any(all(pillow_blends(factor, fused) for factor in factors) for fused in (False, True))


@pytest.mark.parametrize("v", range(1, 10))
def test_blend_is_pillows_for_every_pair_of_levels(v: int) -> None:
    """Images reach few of the 65 536 pairs, and float32 rounding matters in few of those."""
    other, image = (np.asarray(each) for each in level_pairs())
    expected = Image.blend(*level_pairs(), 0.05 + 0.09 * v)
    weights = weight_table()[:, v].numpy()
    for_image, _, for_other, _ = weights[OPERATIONS.index("Contrast")]
    np.testing.assert_array_equal((for_other * other + for_image * image) >> 22, expected)
    for name, column in (("Brightness", 0), ("Color", 1), ("Sharpness", 3)):
        row = weights[OPERATIONS.index(name)]
        assert row[0] == for_image
        assert row[column] == (for_image if column == 0 else for_other)
        assert np.count_nonzero(row) == (1 if column == 0 else 2)


def test_autocontrast_is_pillows_for_every_range() -> None:
    """Lowest and highest level in a fifth of all 32 640 pairs, with all the levels between."""
    low, high = torch.triu_indices(256, 256, 1)
    level = torch.arange(256)
    spans = torch.minimum(torch.maximum(level, low[:, None]), high[:, None]).to(torch.uint8)
    images = spans[::5].view(-1, 1, 16, 16)
    n = len(images)
    found = apply_operation(
        images, torch.zeros(n, dtype=torch.int64), torch.ones(n).long(), torch.zeros(n).bool()
    )
    for image, out in zip(images, found, strict=True):
        assert torch.equal(out, from_pillow(ImageOps.autocontrast(to_pillow(image))))


@settings(max_examples=40)
@given(
    st.sampled_from(OPERATIONS),
    st.sampled_from([1, 3]),
    st.integers(4, 50),
    st.integers(4, 50),
    st.integers(0, 2**32 - 1),
)
def test_any_size_is_pillows(name: str, channels: int, h: int, w: int, seed: int) -> None:
    assert_like_pillow(name, random_images(1, channels, h, w, seed))


def test_a_mixed_batch_gives_every_image_its_own_operation() -> None:
    n = 14 * 18
    images = random_images(n, 3, 32, 32, seed=3)
    number = torch.arange(n)
    op, magnitude, negative = number % 14, number // 14 % 9 + 1, number // 126 == 1
    found = apply_operation(images, op, magnitude, negative)
    for i in range(n):
        sign = -1 if negative[i] else 1
        reference = PILLOW[OPERATIONS[op[i]]](to_pillow(images[i]), int(magnitude[i]), sign)
        assert torch.equal(found[i], from_pillow(reference)), OPERATIONS[op[i]]


@pytest.mark.parametrize("size", [*SIZES, (4, 5)], ids=str)
@pytest.mark.parametrize("flip", [True, False])
def test_weak_view_is_pad_crop_flip(size: tuple[int, int], flip: bool) -> None:
    h, w = size
    pad_y, pad_x = max(1, h // 8), max(1, w // 8)
    images, draws = random_images(300, 3, h, w), draws_for(300, WEAK_DRAWS)
    views = weak_views(images, draws, flip).numpy()
    seen = set()
    for image, view in zip(images.numpy(), views, strict=True):
        found = []
        for flipped in (False, True):
            turned = image[:, :, ::-1] if flipped else image
            padded = np.pad(turned, ((0, 0), (pad_y, pad_y), (pad_x, pad_x)), mode="reflect")
            for y in range(2 * pad_y + 1):
                for x in range(2 * pad_x + 1):
                    if np.array_equal(padded[:, y : y + h, x : x + w], view):
                        found.append((flipped, y, x))
        assert len(found) == 1, "exactly one flip and shift explains the view"
        seen.update(found)
    assert {flipped for flipped, _, _ in seen} == ({False, True} if flip else {False})
    assert {y for _, y, _ in seen} == set(range(2 * pad_y + 1))
    assert {x for _, _, x in seen} == set(range(2 * pad_x + 1))


@pytest.mark.parametrize(("views", "count"), [(weak_views, WEAK_DRAWS), (strong_views, STRONG_DRAWS)])
def test_identical_images_get_different_views(
    views: Callable[[Tensor, Tensor, bool], Tensor], count: int
) -> None:
    images = random_images(1, 3, 32, 32).expand(200, -1, -1, -1)
    made = views(images, draws_for(200, count), True)
    assert len({view.numpy().tobytes() for view in made}) > (100 if count == WEAK_DRAWS else 190)


@pytest.mark.parametrize(("views", "count"), [(weak_views, WEAK_DRAWS), (strong_views, STRONG_DRAWS)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_view_depends_on_its_own_image_and_draws_alone(
    views: Callable[[Tensor, Tensor, bool], Tensor], count: int, channels: int
) -> None:
    images, draws = random_images(64, channels, 28, 28), draws_for(64, count)
    whole = views(images, draws, True)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(views(images[order], draws[order], True), whole[order])
    assert torch.equal(views(images[7:20], draws[7:20], True), whole[7:20])
    assert torch.equal(views(images[5:6], draws[5:6], True), whole[5:6])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [*SIZES, (4, 4), (37, 20)], ids=str)
def test_shape_type_and_input_are_kept(channels: int, size: tuple[int, int]) -> None:
    for n in (0, 1, 33):
        images = random_images(n, channels, *size)
        before = images.clone()
        for views, count in ((weak_views, WEAK_DRAWS), (strong_views, STRONG_DRAWS)):
            made = views(images, draws_for(n, count), True)
            assert made.shape == images.shape
            assert made.dtype == torch.uint8
            assert torch.equal(images, before)


def test_views_that_are_not_contiguous_count_the_same() -> None:
    images = random_images(16, 3, 32, 32).to(memory_format=torch.channels_last)
    draws = draws_for(16, STRONG_DRAWS)
    plain = strong_views(images.contiguous(), draws, True)
    assert torch.equal(strong_views(images, draws, True), plain)


@pytest.mark.slow
def test_strong_views_trace_as_one_graph() -> None:
    """No shape and no branch depends on the data, or the tracer would refuse."""
    images, draws = random_images(8, 3, 16, 16), draws_for(8, STRONG_DRAWS)
    expected = strong_views(images, draws, True)
    traced = torch.compile(strong_views, fullgraph=True, backend="eager")
    assert torch.equal(traced(images, draws, True), expected)


@pytest.mark.parametrize("size", [*SIZES, (9, 9), (37, 20)], ids=str)
def test_cutout_is_a_square_of_half_the_height(size: tuple[int, int]) -> None:
    """On black images every operation but Solarize keeps black, so the grey square stands alone."""
    h, w = size
    side, n = h // 2, 4000
    images = torch.zeros(n, 1, h, w, dtype=torch.uint8)
    square = strong_views(images, draws_for(n, STRONG_DRAWS), True)[:, 0] == 127
    rows, columns = square.any(2), square.any(1)
    assert torch.equal(square, rows[:, :, None] & columns[:, None, :])
    for inside, length in ((rows, h), (columns, w)):
        start = inside.int().argmax(1)
        extent = inside.sum(1)
        assert torch.equal(extent, torch.clamp(length - start, max=side))
        # Centres are uniform on 0..length-1, so starts are too, save the first that gathers many.
        expected = np.full(length - side // 2, n / length)
        expected[0] *= side // 2 + 1
        found = torch.bincount(start, minlength=len(expected)).numpy()
        assert len(found) == len(expected)
        assert ((found - expected) ** 2 / expected).sum() < 2 * len(expected) + 30


def test_half_of_all_operations_apply_and_all_are_as_likely() -> None:
    """Which operations an image got is seen by repeating them, draw by draw, outside the module."""
    n = 8000
    draws = draws_for(n, STRONG_DRAWS)
    high = (draws >> 32) & 0xFFFFFFFF  # the half of a draw that counts
    for first in (WEAK_DRAWS, WEAK_DRAWS + 4):
        chosen = (high[:, first] * 14) >> 32
        assert (torch.bincount(chosen, minlength=14) / n - 1 / 14).abs().max() < 0.015
    images = random_images(1, 3, 16, 16).expand(n, -1, -1, -1)
    weakly = weak_views(images, draws[:, :WEAK_DRAWS], True)
    strongly = strong_views(images, draws, True)
    outside = strongly != 127
    same = ((strongly == weakly) | ~outside).flatten(1).all(1).float().mean()
    # Each layer leaves this image alone if it does not apply, is Identity, or is AutoContrast or
    # Equalize on an image that is already even (not this one, or nearly so).
    alone = 1 / 2 + 1 / 2 / 14
    assert alone**2 - 0.02 < same < (alone + 1 / 14) ** 2 + 0.02


def test_strong_is_weak_then_two_layers_then_cutout() -> None:
    n = 500
    images, draws = random_images(n, 3, 32, 32), draws_for(n, STRONG_DRAWS, seed=2)
    high = (draws >> 32) & 0xFFFFFFFF
    made = strong_views(images, draws, False)
    weakly = weak_views(images, draws[:, :WEAK_DRAWS], False)
    for i in range(n):
        image = to_pillow(weakly[i])
        for first in (WEAK_DRAWS, WEAK_DRAWS + 4):
            op, applied, v, negative = (
                int(high[i, first + k] * bound >> 32) for k, bound in enumerate((14, 2, 9, 2))
            )
            if applied:
                image = PILLOW[OPERATIONS[op]](image, v + 1, -1 if negative else 1)
        expected = from_pillow(image)
        y, x = (max(0, int(high[i, k] * 32 >> 32) - 8) for k in (-2, -1))
        expected[:, y : y + 16, x : x + 16] = 127
        assert torch.equal(made[i], expected)


@pytest.mark.parametrize("make", [weak, strong])
def test_wrappers_follow_their_generator(
    make: Callable[[Tensor, torch.Generator | None], Tensor],
) -> None:
    images = random_images(50, 3, 32, 32)
    first, again, other = (make(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    default = make(images, None)
    torch.manual_seed(5)
    assert torch.equal(make(images, None), default)


@pytest.mark.parametrize("make", [weak, strong])
@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 3, 8, 8),
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 4, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 3, 3, 8, dtype=torch.uint8),
    ],
    ids=["float", "rank", "channels", "too small"],
)
def test_wrappers_say_what_to_pass(
    make: Callable[[Tensor, torch.Generator | None], Tensor], images: Tensor
) -> None:
    with pytest.raises(ValueError, match=r"\[N, C, H, W\]"):
        make(images, None)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_normalise(channels: int, dtype: torch.dtype) -> None:
    images = random_images(5, channels, 8, 8)
    mean, std = [0.4914, 0.4822, 0.4465][:channels], [0.2471, 0.2435, 0.2616][:channels]
    direct = images.numpy() / 255.0
    direct = (direct - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
    made = normalise(images, mean, std, dtype)
    assert made.dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    np.testing.assert_allclose(made.double().numpy(), direct, rtol=tolerance, atol=tolerance)
    means, stds = (torch.tensor(x, dtype=torch.float64) for x in (mean, std))
    assert torch.equal(normalise(images, means, stds, dtype), made)


def test_normalise_wants_one_mean_per_channel() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 8, 8\].*\[1\].*\[1\]"):
        normalise(random_images(2, 3, 8, 8), [0.5], [0.5], torch.float32)


@pytest.mark.parametrize("channels", [1, 3])
def test_large_images_get_the_bytes_of_small_ones(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU large images take a shorter way to the same views."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (150, channels, 64, 70), dtype=torch.uint8, generator=generator)
    images[::7] //= 4  # some that AutoContrast stretches
    draws = torch.randint(-(2**62), 2**62, (150, augment.STRONG_DRAWS), generator=generator)
    short = augment.strong_views(images, draws, True)
    monkeypatch.setattr(augment, "LARGE", 10**9)
    assert torch.equal(short, augment.strong_views(images, draws, True))
