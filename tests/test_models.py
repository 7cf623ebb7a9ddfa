"""The networks: their sizes, their normalisation, their dropout."""

import pytest
import torch
from torch import nn

from ssfl.core import draws, rows
from ssfl.errors import ConfigError
from ssfl.models import layers, networks
from ssfl.models.kernels import normalisation

CIFAR, EMNIST, STL, DIGITS = (3, 32, 32), (1, 28, 28), (3, 96, 96), (1, 8, 8)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "shape", "norm", "parameters"),
    [
        ("cnn", 47, EMNIST, "none", 1_204_655),
        ("cnn", 47, EMNIST, "group", 1_204_847),
        ("resnet18", 10, CIFAR, "group", 11_173_962),
        ("resnet18", 10, CIFAR, "batch", 11_173_962),
        ("resnet9", 10, CIFAR, "group", 6_575_370),
        ("vgg11", 10, STL, "batch", 11_653_770),
        ("wide_resnet", 10, CIFAR, "batch", 1_467_610),
    ],
)
def test_parameter_counts(
    name: str, classes: int, shape: tuple[int, int, int], norm: str, parameters: int
) -> None:
    assert count(networks.build(name, classes, shape, norm)) == parameters


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("name", networks.MODELS)
def test_every_network_runs_with_every_norm(name: str, norm: str) -> None:
    shape = {"vgg11": (3, 32, 32), "small": DIGITS, "cnn": EMNIST}.get(name, (3, 16, 16))
    model = networks.build(name, 7, shape, norm)
    images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    key = torch.tensor(draws.key(1, "dropout"))
    model(images, key).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    assert model(images).shape == (4, 7)


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (9, 5)])
def test_batch_norm_is_torchs_own(shape: tuple[int, ...]) -> None:
    ours = layers.BatchNorm(5).double()
    theirs = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(5).double()
    for step in range(3):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_batch_too_large_for_the_kernels_is_normalised_without_them() -> None:
    """They compute offsets within one model's images in 31 bits."""
    x = torch.empty(2 * 512, 256, 128, 128, device="meta")  # 2 models, 2^31 values each
    assert not normalisation.offsets_fit(x, 2)
    assert normalisation.offsets_fit(x[:-2], 2)
    assert normalisation.offsets_fit(x, 4)


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (networks.build("small", 10, DIGITS, "group", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    layout = rows.layout_of(one)
    assert torch.equal(rows.row_of(one, layout), rows.row_of(same, layout))
    assert not torch.equal(rows.row_of(one, layout), rows.row_of(other, layout))


def test_dropout_is_named_drops_a_quarter_of_the_channels_and_keeps_the_mean() -> None:
    key = torch.tensor(draws.key(1, "dropout", 3, 4, 5))
    x = torch.ones(100, 64, 2, 2)
    once = layers.dropout(x, 0.25, key)
    assert torch.equal(once, layers.dropout(x, 0.25, key))
    assert not torch.equal(once, layers.dropout(x, 0.25, key + 1))
    assert torch.equal(once.amax((2, 3)), once.amin((2, 3)))
    assert abs(float((once == 0).float().mean()) - 0.25) < 0.02
    assert abs(float(once.mean()) - 1) < 0.03


def test_a_row_goes_into_a_network_and_comes_out_again() -> None:
    model = networks.build("small", 10, DIGITS, "batch")
    layout = rows.layout_of(model)
    assert layout.length == count(model) + 2 * (16 + 32)
    row = torch.randn(layout.length)
    rows.write_row(model, layout, row)
    assert torch.equal(rows.row_of(model, layout), row)
    assert torch.equal(layout.flatten(layout.unflatten(row)), row)
    matrix = torch.randn(3, layout.length)
    named = layout.unflatten(matrix)
    assert named["conv2.weight"].shape == (3, 32, 16, 3, 3)
    assert torch.equal(layout.flatten(named, lead=1), matrix)


def test_a_network_that_needs_larger_images_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        networks.build("vgg11", 10, DIGITS, "group")
    assert (caught.value.key, caught.value.value, caught.value.fix) == (
        "model.name",
        "vgg11",
        "model.name=small",
    )


@pytest.mark.parametrize(
    ("shape", "name"), [(DIGITS, "small"), (EMNIST, "cnn"), (CIFAR, "resnet18"), (STL, "vgg11")]
)
def test_the_network_suits_the_images(shape: tuple[int, int, int], name: str) -> None:
    assert networks.suited(shape, gpu=True) == name


@pytest.mark.parametrize(
    ("shape", "name"),
    [(DIGITS, "small"), (EMNIST, "cnn"), (CIFAR, "cnn"), ((3, 64, 64), "cnn"), (STL, "small")],
)
def test_without_a_gpu_the_network_is_one_that_a_cpu_can_train(
    shape: tuple[int, int, int], name: str
) -> None:
    assert networks.suited(shape, gpu=False) == name


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("name", list(networks.MODELS))
def test_two_models_at_once_are_each_by_itself(name: str, norm: str) -> None:
    """Outputs, gradients and statistics, with parameters stacked and images one model after another."""
    shape = (3, networks.SMALLEST[name], networks.SMALLEST[name])
    nets = [networks.build(name, 5, shape, norm, seed).double().train() for seed in (1, 2)]
    stacked = {
        key: torch.stack(
            [dict([*net.named_parameters(), *net.named_buffers()])[key].detach() for net in nets]
        )
        for key in rows.layout_of(nets[0]).names
    }
    weights = {key: stacked[key].requires_grad_() for key, _ in nets[0].named_parameters()}
    images = torch.randn(2, 4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    keys = torch.tensor([11, 12])
    together = torch.func.functional_call(nets[0], stacked, (images.flatten(0, 1), keys))
    found = torch.autograd.grad(together.square().sum(), list(weights.values()))
    for i, net in enumerate(nets):
        alone = net(images[i], keys[i])
        assert torch.allclose(together[4 * i : 4 * i + 4], alone, rtol=1e-9, atol=1e-12)
        alone.square().sum().backward()
        for slope, (key, weight) in zip(found, net.named_parameters(), strict=True):
            assert weight.grad is not None
            assert torch.allclose(slope[i], weight.grad, rtol=1e-6, atol=1e-9), key
        for key, value in net.named_buffers():
            assert torch.allclose(stacked[key][i], value, rtol=1e-9), key
