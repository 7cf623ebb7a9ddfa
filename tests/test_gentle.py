"""Gentle views: small changes of place and tone, with own draws for every image; data.views chooses them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import ssfl
from ssfl.core import draws
from ssfl.data import augment, gentle
from ssfl.data.gentle import BRIGHTNESS, GENTLE_DRAWS, STEPS, gentle_views
from ssfl.data.views import KINDS
from ssfl.deploy import wire
from ssfl.engines.features import Features
from ssfl.errors import ConfigError
from ssfl.models import backbones
from ssfl.runs import resolve

MIDDLE = ((STEPS // 2) << 64) // STEPS + (1 << 40)
"""A draw for the value in the middle, which changes nothing."""


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def drawn(**steps: int) -> Tensor:
    """Draws that change nothing but the named ones, which get the given step of `STEPS`."""
    names = ("flip", "angle", "zoom", "stretch", "down", "right", "gamma", "contrast", "brightness")
    values = [0, *[MIDDLE] * (GENTLE_DRAWS - 1)]
    for name, step in steps.items():
        values[names.index(name)] = (step << 64) // (2 if name == "flip" else STEPS) + (1 << 40)
    return torch.tensor([[signed(value) for value in values]])


def random_images(count: int, channels: int, height: int, width: int) -> Tensor:
    numbers = np.random.default_rng(0).integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    return torch.from_numpy(numbers)


def smooth_images(side: int = 64) -> Tensor:
    """A bright disc right of and below the centre."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    inside = (y - 0.6 * side) ** 2 + (x - 0.7 * side) ** 2 < (side / 8) ** 2
    return (60 + 120 * inside).to(torch.uint8).expand(1, 1, side, side)


def centre(image: Tensor) -> tuple[float, float]:
    """The centre of the bright pixels: row and column."""
    bright = (image[0, 0] > 120).nonzero().double()
    return float(bright[:, 0].mean()), float(bright[:, 1].mean())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 20, 37), (3, 64, 64)])
def test_the_middle_of_every_draw_changes_nothing(shape: tuple[int, int, int]) -> None:
    images = random_images(2, *shape)
    assert torch.equal(gentle_views(images, drawn().expand(2, -1), True), images)


def test_a_flip_is_exact_and_only_where_allowed() -> None:
    images = random_images(1, 3, 24, 17)
    assert torch.equal(gentle_views(images, drawn(flip=1), True), images.flip(-1))
    assert torch.equal(gentle_views(images, drawn(flip=1), False), images)


@pytest.mark.parametrize(("name", "row", "column"), [("down", -3, 0), ("right", 0, -3)])
def test_a_shift_moves_by_five_percent(name: str, row: int, column: int) -> None:
    images = smooth_images()
    there, here = centre(gentle_views(images, drawn(**{name: STEPS - 1}), False)), centre(images)
    assert there[0] - here[0] == pytest.approx(row, abs=0.5)
    assert there[1] - here[1] == pytest.approx(column, abs=0.5)


def test_zoom_and_angle_keep_the_middle_of_the_picture() -> None:
    images = smooth_images()
    larger = gentle_views(images, drawn(zoom=0), False)
    assert int((larger > 120).sum()) > 1.3 * int((images > 120).sum())
    turned = centre(gentle_views(images, drawn(angle=0), False))
    middle = 31.5
    before, after = (torch.tensor(one) - middle for one in (centre(images), turned))
    assert float(after.norm()) == pytest.approx(float(before.norm()), abs=0.7)
    cosine = float((before * after).sum() / before.norm() / after.norm())
    assert np.degrees(np.arccos(cosine)) == pytest.approx(10, abs=1.5)


def test_brightness_contrast_and_gamma() -> None:
    images = random_images(1, 3, 16, 16) // 2 + 64
    brighter = gentle_views(images, drawn(brightness=STEPS - 1), False)
    assert torch.equal(brighter, (images.int() + BRIGHTNESS).to(torch.uint8))
    flatter, darker = (gentle_views(images, drawn(**change), False).double() for change in
                       ({"contrast": 0}, {"gamma": STEPS - 1}))  # fmt: skip
    assert float(flatter.std()) == pytest.approx(0.7 * float(images.double().std()), rel=0.02)
    assert float(darker.mean()) < float(images.double().mean()) - 10


def test_images_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    images, rows = random_images(5, 3, 32, 32), draws.bits(torch.arange(5), GENTLE_DRAWS)
    together = gentle_views(images, rows, True)
    for place in range(5):
        assert torch.equal(
            gentle_views(images[place : place + 1], rows[place : place + 1], True)[0], together[place]
        )
    monkeypatch.setattr(gentle, "AT_ONCE", 2 * images[0].numel())
    assert torch.equal(gentle_views(images, rows, True), together)
    assert len({view.numpy().tobytes() for view in together}) == 5
    assert gentle_views(images[:0], rows[:0], True).shape == (0, 3, 32, 32)


def folder_of_images(where: Path) -> Path:
    for number, name in enumerate(("cat", "dog")):
        for image in range(6):
            pixels = np.full((12, 12), 60 * number + 9 * image, np.uint8)
            (where / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(where / name / f"{image}.png")
    return where


def test_the_setting_chooses_the_views_of_data_and_sites(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "pets")
    for kind, pair in KINDS.items():
        config = ssfl.load_config("own", [f"data.path={folder}", f"data.views={kind}", "split.users=1"])
        data = resolve.load_data(config)
        assert (data.weak, data.strong) == pair
        terms = wire.read_terms(wire.Terms.of(resolve.resolve(config, data), data, {}).text())
        assert terms.config.data.views == kind
    with pytest.raises(ConfigError) as error:
        ssfl.load_config("own", [f"data.path={folder}", "data.views=strange"])
    assert error.value.key == "data.views"
    assert error.value.value == "strange"


def test_own_augmentations_stay() -> None:
    images, labels = random_images(8, 1, 8, 8)[:, 0], torch.arange(8) % 2
    own = ssfl.Data(images, labels, images, labels, weak=lambda images, rows: images)
    data = resolve.load_data(ssfl.load_config("own", ["data.name=in memory", "data.views=gentle"]), own)
    assert data.weak not in (augment.WEAK, gentle.GENTLE)
    assert data.strong == gentle.GENTLE


def test_features_of_other_views_are_stored_elsewhere() -> None:
    network = backbones.lite0(2, "head", pretrained=False)
    folders = {Features.of(network, 1, [0.5], [0.5], False, *pair, 1).folder for pair in KINDS.values()}
    assert len(folders) == len(KINDS)
    assert None not in folders
    assert Features.of(network, 1, [0.5], [0.5], False, gentle.GENTLE, augment.STRONG, 1).folder is None


def test_the_preset_for_pretrained_networks_uses_them() -> None:
    assert ssfl.load_config("pictures", ["data.path=somewhere"]).data.views == "gentle"


def test_views_of_one_kind_are_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSFL_CACHE", str(tmp_path))
    network, images = backbones.lite0(2, "head", pretrained=False), random_images(2, 1, 32, 32)
    for kind, count in (("standard", 2), ("gentle", 4), ("semifl", 2)):
        features = Features.of(network, 2, [0.5], [0.5], False, *KINDS[kind], 1)
        features.prepare(images, torch.arange(2))
        weak, strong = features.views
        assert weak.shape == strong.shape == (2, count, backbones.FEATURES)
        assert (weak is strong) == (kind == "gentle")
    features.views = (torch.arange(4.0).view(1, 4, 1).expand(2, 4, 1),) * 2
    for round, drawn in ((0, {0, 1}), (1, {0, 1, 2, 3}), (9, {0, 1, 2, 3})):
        features.use(round)
        chosen = features.at(0, torch.ones(40).long(), draws.bits(torch.arange(40), 1)[:, 0], torch.float32)
        assert set(chosen.flatten().tolist()) == drawn


OWN = """
import numpy as np
import ssfl
from ssfl.data import gentle

def views(images, rows):
    return gentle.gentle_views(images, rows[:, : gentle.GENTLE_DRAWS], False)

def load():
    images, labels = np.zeros((8, 8, 8), np.uint8), np.arange(8) % 2
    return ssfl.Data(images, labels, images, labels, weak=views, strong=views)
"""


@pytest.mark.parametrize("kind", list(KINDS))
def test_sites_are_never_told_other_views_than_the_centre_has(kind: str, tmp_path: Path) -> None:
    """Own augmentations cannot be sent, whatever data.views says; also not if they are a copy of ours."""
    centre = pytest.importorskip("ssfl.deploy.centre", reason="needs Flower")
    (tmp_path / "own.py").write_text(OWN)
    sets = [f"data.name={tmp_path / 'own.py'}:load", f"data.views={kind}", "split.users=1"]
    with pytest.raises(ConfigError) as error:
        centre.prepare(ssfl.load_config("own", sets))
    assert error.value.key == "data.name"
