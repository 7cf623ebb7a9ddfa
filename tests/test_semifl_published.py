"""What the preset semifl-published adds to SemiFL, compared with Pillow, plain PyTorch and simple loops: its
authors' strong views and network, BatchNorm statistics over everyone's images, and one label per image."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn

from ssfl.config.loading import load_config
from ssfl.core import draws
from ssfl.core.rows import statistics, write_row
from ssfl.data import semifl_views as views
from ssfl.errors import ConfigError
from ssfl.federation import Look
from ssfl.methods import parts
from ssfl.models import networks
from ssfl.runs import assemble
from test_augment import random_images

Picture = Image.Image
POINTS: dict[str, Callable[[Picture], Picture]] = {
    "AutoContrast": ImageOps.autocontrast,
    "Brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.9),
    "Color": lambda image: ImageEnhance.Color(image).enhance(1.9),
    "Contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.9),
    "Equalize": ImageOps.equalize,
    "Invert": ImageOps.invert,
    "Posterize": lambda image: ImageOps.posterize(image, 4),
    "Sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1.9),
    "Solarize": lambda image: ImageOps.solarize(image, 0),
}


def affine(image: Picture, *numbers: float) -> Picture:
    return image.transform(image.size, Image.Transform.AFFINE, numbers, Image.Resampling.BILINEAR)


MOVES: dict[str, Callable[[Picture, int], Picture]] = {
    "Rotate": lambda image, sign: image.rotate(30 * sign),
    "ShearX": lambda image, sign: affine(image, 1, 0.3 * sign, 0, 0, 1, 0),
    "ShearY": lambda image, sign: affine(image, 1, 0, 0, 0.3 * sign, 1, 0),
    "TranslateX": lambda image, sign: affine(image, 1, 0, 100 * sign, 0, 1, 0),
    "TranslateY": lambda image, sign: affine(image, 1, 0, 0, 0, 1, 100 * sign),
}


def ours(name: str, sign: int, images: Tensor) -> np.ndarray:
    op, nothing = (
        torch.full((len(images),), views.ALL.index(name)),
        torch.zeros(len(images), dtype=torch.long),
    )
    return views.apply(images, op, torch.full((len(images),), sign < 0), nothing, nothing).numpy()


def pillows(change: Callable[[Picture], Picture], images: Tensor) -> np.ndarray:
    pictures = images.permute(0, 2, 3, 1).numpy()
    changed = [np.asarray(change(Image.fromarray(one))) for one in pictures]
    return np.stack(changed).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (128, 120)])
def test_operations_are_pillows(size: tuple[int, int]) -> None:
    images = random_images(12, 3, *size)
    for name, change in POINTS.items():
        assert (ours(name, 1, images) == pillows(change, images)).all(), name
    for name, move in MOVES.items():
        for sign in (1, -1):
            apart = ours(name, sign, images) - pillows(lambda one: move(one, sign), images).astype(int)  # noqa: B023
            # Pillow's sums in floating point are sometimes a little below a whole number, which it cuts off
            most, often = (1, 0.02) if name.startswith("Shear") else (0, 0)
            assert abs(apart).max() <= most, name
            assert (apart != 0).mean() <= often, name
    assert {*POINTS, *MOVES, "Cutout"} == {*views.ALL}


def test_cutout_is_a_square_of_forty_pixels_that_starts_inside() -> None:
    images = torch.zeros(400, 3, 64, 64, dtype=torch.uint8)
    rows = draws.bits(torch.arange(len(images)), 2)
    cut = torch.full((len(images),), views.ALL.index("Cutout"))
    made = views.apply(images, cut, cut > 99, rows[:, 0], rows[:, 1])
    assert set(made.unique().tolist()) == {0, 127}
    for side in (2, 3):
        grey = (made == 127).any(1).any(4 - side)  # [N, 64]: along one side
        first = grey.to(torch.uint8).argmax(1)
        assert first.min() == 0
        assert first.max() == 64 - 1 - 20
        assert (grey.sum(1) == (first + 41).clamp(max=64) - first).all()


def test_views_are_drawn_as_often_as_the_authors_draw_them() -> None:
    images = random_images(1, 3, 32, 32).expand(3_000, -1, -1, -1)
    made = views.strong_views(images, draws.bits(torch.arange(len(images)), views.DRAWS), False)
    plain = made.flatten(1)
    one_colour = (plain.amax(1) == plain.amin(1)).double().mean()
    # a translation, or Cutout that begins at the first pixel of both sides, in the first or second operation
    alone = 0.5 * (2 + (21 / 32) ** 2) / 15
    assert abs(one_colour - (1 - (1 - alone) ** 2)) < 0.03
    grey = views.strong_views(random_images(64, 1, 28, 28), draws.bits(torch.arange(64), views.DRAWS), True)
    assert grey.shape == (64, 1, 28, 28)


def test_the_network_has_the_authors_initial_weights() -> None:
    network = networks.build("wide_resnet_relu", 10, (3, 32, 32), "batch")
    plain = networks.build("wide_resnet", 10, (3, 32, 32), "batch")
    assert isinstance(network, networks.WideResNet)
    assert sum(weight.numel() for weight in network.parameters()) == 1_467_610
    assert not network.fc.bias.any()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d):
            wanted = sqrt(2 / (layer.out_channels * layer.kernel_size[0] ** 2))
            assert layer.weight.std().item() == pytest.approx(wanted, rel=0.1), name
    images = torch.randn(4, 3, 32, 32)
    plain.load_state_dict(network.state_dict())
    assert not torch.allclose(plain(images), network(images))
    for block in plain.blocks:  # type: ignore[union-attr]
        block.slope = 0.0
    plain.slope = 0.0  # type: ignore[assignment]
    assert torch.equal(plain(images), network(images))


def test_statistics_are_means_over_batches_of_everyones_images() -> None:
    settings = [
        "federation.rounds=2", "federation.period=2", "train.batch_size=16", "train.server_batch_size=50",
        "train.precision=float64", "run.threads=1", "method.name=semifl", "model.norm=batch",
        "model.norm_statistics=everyone",
    ]  # fmt: skip
    sim = assemble.make(load_config("quickstart", settings))
    state = sim.initial()
    row = sim.final_row(replace(state, average=state.average * 1.1))
    owned = np.concatenate([sim.parts.server, *sim.parts.users])
    write_row(sim.model, sim.layout, state.average * 1.1)
    first = next(iter(statistics(sim.model))).rpartition(".")[0]
    layer = sim.model.get_submodule(first)
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    sim.model.train()
    for batch in torch.from_numpy(owned).split(50):
        sim.model(sim.pool.normalised(sim.pool.images[batch]), torch.tensor(0))
    hook.remove()
    means = torch.stack([batch.mean((0, 2, 3)) for batch in seen]).mean(0)
    write_row(sim.model, sim.layout, row)
    assert torch.allclose(layer.running_mean, means, rtol=1e-9)  # type: ignore[arg-type]
    # users label with these statistics, too
    sent: list[Tensor] = []
    train = sim.engine.train
    sim.engine.train = lambda rows, *rest: sent.append(rows) or train(rows, *rest)  # type: ignore
    sim.play(state)
    count = sim.layout.weights
    assert torch.equal(sent[0][0, count:], sim.final_row(state)[count:])
    assert torch.equal(sent[0][0, :count], state.average[:count])
    sim.engine.close()


@pytest.mark.parametrize("setting", ["run.engine=dist"])
def test_statistics_of_everyone_need_a_simulation_in_one_process(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", ["model.norm_statistics=everyone", setting])
    assert caught.value.key == "model.norm_statistics"


def test_an_image_has_the_label_of_its_first_view() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 7, (3, 4, 5), generator=generator)
    probabilities = torch.rand(3, 20, 6, generator=generator)
    look = Look(probabilities, images, torch.zeros(3, dtype=torch.long), {}, False, None)
    made = parts.once_per_image(look)
    for user in range(3):
        first: dict[int, Tensor] = {}
        for place, image in enumerate(images[user].flatten().tolist()):
            wanted = first.setdefault(image, probabilities[user, place])
            assert torch.equal(made.probabilities[user, place], wanted)
