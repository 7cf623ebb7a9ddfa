"""The GPU kernels against the plain layers they stand for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ssfl.core.rows import Layout
from ssfl.engines import buffers
from ssfl.engines.buffers import StepBuffers, sgd, sgd_by_kernels
from ssfl.engines.work import Optimizer
from ssfl.models import layers, networks
from ssfl.models.kernels import convolution, normalisation, stem

if torch.cuda.is_available():
    from ssfl.models.kernels import triton_tma

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ROUNDED = 4e-3  # bfloat16 keeps eight bits


def random(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours.float() - theirs).norm() / theirs.norm()) < ROUNDED


def gradients_close(found: Tensor, given: list[Tensor], expected: Tensor, exact: list[Tensor],
                    tolerance: float, seed: int) -> bool:  # fmt: skip
    """Whether the gradients of `found` with respect to `given` are those of `expected` with respect to
    `exact`, in a random direction."""
    towards = random(*expected.shape, seed=seed)
    ours = torch.autograd.grad(found, given, towards)
    theirs = torch.autograd.grad(expected, exact, towards.float())
    apart = [float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    return max(apart) < tolerance


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    biases = [None] * len(weight) if bias is None else bias.unbind()
    parts = zip(x.chunk(len(weight)), weight.unbind(), biases, strict=True)
    return torch.cat([F.conv2d(*part, stride, padding) for part in parts])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize(
    ("models", "images", "inputs", "outputs", "size", "kernel", "stride", "padding"),
    [
        (5, 9, 32, 64, 26, 3, 1, 0),
        (3, 7, 64, 64, 32, 3, 1, 1),
        (2, 5, 64, 128, 15, 3, 2, 1),
        (2, 5, 64, 128, 16, 1, 2, 0),
        (2, 3, 48, 16, 7, 3, 1, 1),
        (1, 4, 256, 512, 4, 3, 2, 1),
        (3, 16, 256, 256, 8, 3, 1, 1),
        (2, 64, 512, 512, 4, 3, 1, 1),
        (2, 8, 256, 512, 8, 1, 2, 0),
        (2, 6, 128, 192, 12, 3, 1, 1),
        (3, 6, 32, 32, 32, 3, 1, 1),  # two columns are computed together
        (2, 5, 16, 32, 8, 3, 1, 1),
        (2, 5, 32, 32, 7, 3, 1, 1),
        (4, 6, 1, 32, 28, 3, 1, 0),
        (3, 5, 3, 64, 32, 3, 1, 1),
        (3, 5, 3, 16, 9, 3, 2, 1),
    ],
)
def test_convolution(models: int, images: int, inputs: int, outputs: int, size: int,
                     kernel: int, stride: int, padding: int, bias: bool, older: bool,
                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    if older:  # what GPUs before Hopper use
        monkeypatch.setattr(triton_tma, "hopper", lambda device: False)
    elif not triton_tma.hopper(torch.device("cuda:0")):
        pytest.skip("needs a Hopper GPU")
    x = random(models * images, inputs, size, size)
    weight = random(models, outputs, inputs, kernel, kernel, seed=2) / (inputs * kernel**2) ** 0.5
    shift = random(models, outputs, seed=3) if bias else None
    given = [x.requires_grad_(inputs > 4), weight.requires_grad_()]
    given += [shift.requires_grad_()] if shift is not None else []
    assert convolution.suit(x, weight)
    found = convolution.convolve(x, weight, shift, stride, padding)
    exact = [each.detach().float().requires_grad_(each.requires_grad) for each in given]
    expected = plain(exact[0], exact[1], exact[2] if bias else None, stride, padding)
    assert close(found, expected)
    trained = [[each for each in tensors if each.requires_grad] for tensors in (given, exact)]
    assert gradients_close(found, trained[0], expected, trained[1], ROUNDED, seed=4)


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize(
    ("models", "images", "channels", "size"), [(3, 64, 1, 28), (2, 5, 3, 32), (2, 7, 1, 12), (1, 2, 3, 70)]
)
def test_two_convolutions_with_pooling(
    models: int, images: int, channels: int, size: int, dropped: bool
) -> None:
    if not triton_tma.hopper(torch.device("cuda:0")):
        pytest.skip("needs a Hopper GPU")
    x = random(models * images, channels, size, size)
    weight = random(models, 32, channels, 3, 3, seed=2) / (9 * channels) ** 0.5
    weight2 = random(models, 64, 32, 3, 3, seed=3) / 288**0.5
    given = [weight, random(models, 32, seed=4), weight2, random(models, 64, seed=5)]
    given = [each.requires_grad_() for each in given]
    factors = (random(models * images, 64, seed=6) > 0).bfloat16() / 0.75 if dropped else None
    assert stem.fits(x, weight, weight2)
    found = stem.stem(x, given[0], given[1], given[2], given[3], factors)[0]
    exact = [each.detach().float().requires_grad_() for each in given]
    hidden = F.relu(plain(x.float(), exact[0], exact[1], 1, 0))
    # rounded as in the kernel: otherwise, of two nearly equal pixels, another one would be the largest
    hidden = hidden + (hidden.bfloat16().float() - hidden).detach()
    expected = F.max_pool2d(plain(hidden, exact[2], exact[3], 1, 0), 2)
    expected = F.relu(expected if factors is None else expected * factors[:, :, None, None].float())
    assert close(found, expected)
    assert gradients_close(found, given, expected, exact, 2 * ROUNDED, seed=7)


@pytest.mark.parametrize("training", [True, False])
def test_the_cnn_with_kernels_is_the_plain_cnn(training: bool) -> None:
    network = networks.build("cnn", 47, (1, 28, 28), "none", 1).cuda().bfloat16().train(training)
    state = {name: torch.stack([value, value * 1.1]) for name, value in network.state_dict().items()}
    x, keys = random(2 * 9, 1, 28, 28), torch.tensor([3, 4], device="cuda")
    found = []
    for kernels in (True, False):
        convolution.use(kernels)
        try:
            found.append(torch.func.functional_call(network, state, (x, keys)).float())
        finally:
            convolution.use(True)
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 5 * ROUNDED


@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(
    ("models", "images", "channels", "groups", "size"),
    [(3, 5, 64, 32, 32), (2, 4, 32, 16, 26), (2, 3, 512, 32, 4), (4, 2, 16, 8, 7), (2, 3, 256, 32, 8)],
)
def test_group_norm(models: int, images: int, channels: int, groups: int, size: int, added: bool,
                    slope: float) -> None:  # fmt: skip
    x = random(models * images, channels, size, size) * 2 + 0.5
    weight, bias = random(models, channels, seed=2), random(models, channels, seed=3)
    add = random(*x.shape, seed=4) if added else None
    given = [each.requires_grad_() for each in (x, weight, bias, add) if each is not None]
    assert normalisation.suit(x, groups)
    found = normalisation.group_norm(x, weight, bias, add, groups, 1e-5, slope)
    exact = [each.detach().float().requires_grad_() for each in given]
    parts = zip(exact[0].chunk(models), exact[1].unbind(), exact[2].unbind(), strict=True)
    expected = torch.cat([F.group_norm(part, groups, w, b, 1e-5) for part, w, b in parts])
    expected = F.leaky_relu(expected + exact[3] if added else expected, slope)
    assert close(found, expected)
    assert gradients_close(found, given, expected, exact, 5 * ROUNDED, seed=5)


@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(
    ("models", "images", "channels", "size"),
    [(3, 5, 64, 32), (2, 4, 32, 26), (2, 3, 512, 4), (4, 2, 16, 7), (2, 64, 48, 8)],
)
def test_batch_norm(models: int, images: int, channels: int, size: int, added: bool, slope: float) -> None:
    x = random(models * images, channels, size, size) * 2 + 0.5
    weight, bias = random(models, channels, seed=2), random(models, channels, seed=3)
    add = random(*x.shape, seed=4) if added else None
    given = [each.requires_grad_() for each in (x, weight, bias, add) if each is not None]
    assert normalisation.suit_batch(x, models)
    running = torch.rand(2, models, channels, device="cuda")
    found, *statistics, mean, var = normalisation.batch_norm(
        x, weight, bias, add, running[0], running[1], 0.1, 1e-5, slope
    )
    exact = [each.detach().float().requires_grad_() for each in given]
    followed = running.clone()
    parts = zip(exact[0].chunk(models), *followed, *exact[1:3], strict=True)
    expected = torch.cat([F.batch_norm(part, *two, w, b, True) for part, *two, w, b in parts])  # type: ignore[call-arg]
    expected = F.leaky_relu(expected + exact[3] if added else expected, slope)
    assert close(found, expected)
    variances, means = torch.var_mean(exact[0].unflatten(0, (models, -1)), (1, 3, 4), correction=0)
    assert torch.allclose(statistics[0], means, atol=1e-5)
    assert torch.allclose(statistics[1], variances, rtol=1e-5)
    assert torch.allclose(torch.stack([mean, var]), followed, rtol=1e-5, atol=1e-6)
    assert gradients_close(found, given, expected, exact, 5 * ROUNDED, seed=5)


@pytest.mark.parametrize(
    ("models", "images", "inputs", "outputs", "size", "kernel", "stride", "padding"),
    [
        (3, 6, 32, 32, 32, 3, 1, 1),
        (2, 5, 64, 64, 12, 3, 1, 1),
        (3, 7, 64, 128, 16, 3, 2, 1),
        (2, 64, 512, 512, 4, 3, 1, 1),
        (2, 5, 64, 128, 16, 1, 2, 0),
        (2, 5, 16, 48, 8, 3, 1, 1),  # no kernel computes the sums
        (3, 5, 3, 64, 32, 3, 1, 1),  # nor here
    ],
)
def test_batch_norm_with_the_sums_of_a_convolution(
    models: int, images: int, inputs: int, outputs: int, size: int, kernel: int, stride: int, padding: int
) -> None:
    x = random(models * images, inputs, size, size)
    weight = random(models, outputs, inputs, kernel, kernel, seed=2).requires_grad_()
    scale, shift = random(models, outputs, seed=3), random(models, outputs, seed=4)
    running = torch.randn(models, outputs, device="cuda"), torch.rand(models, outputs, device="cuda")
    running[0][0, :4] = torch.tensor([100.0, 1e30, float("nan"), -float("inf")])  # as noise may make it
    y, sums = convolution.convolve_with_moments(x, weight, stride, padding, running[0], None)
    plain = convolution.convolve(x, weight, None, stride, padding)
    assert torch.equal(y, plain)
    assert bool(sums.numel()) == (triton_tma.hopper(x.device) and inputs > 4 and outputs != 48)
    found = normalisation.batch_norm(y, scale, shift, None, *running, 0.1, 1e-5, 0.0, sums)
    expected = normalisation.batch_norm(plain, scale, shift, None, *running, 0.1, 1e-5, 0.0)
    assert close(found[0], expected[0].float())
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
    towards = random(*y.shape, seed=5)
    ours, theirs = (torch.autograd.grad(each[0], weight, towards)[0] for each in (found, expected))
    assert close(ours, theirs.float())


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "stride"),
    [(32, 32, 32, 1), (64, 64, 16, 1), (64, 128, 16, 2), (128, 128, 8, 1), (16, 48, 6, 1), (3, 64, 8, 1)],
)
def test_a_convolution_adds_a_tensor_before_it_computes_the_sums(
    inputs: int, outputs: int, size: int, stride: int, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:  # what GPUs before Hopper use
        monkeypatch.setattr(triton_tma, "hopper", lambda device: False)
    x, weight = random(10, inputs, size, size), random(2, outputs, inputs, 3, 3, seed=2).requires_grad_()
    add = random(10, outputs, size // stride, size // stride, seed=3).requires_grad_()
    level = torch.randn(2, outputs, device="cuda")
    y, sums = convolution.convolve_with_moments(x, weight, stride, 1, level, add)
    assert close(y, plain(x.float(), weight.float(), None, stride, 1) + add.float())
    if sums.numel():
        apart = y.float().unflatten(0, (2, -1)) - level[:, None, :, None, None]
        assert torch.allclose(sums.sum(1)[:, 0], apart.sum((1, 3, 4)), rtol=1e-3, atol=1e-2)
        assert torch.allclose(sums.sum(1)[:, 1], apart.square().sum((1, 3, 4)), rtol=1e-3)
    towards = random(*y.shape, seed=4)
    to_weight, to_add = torch.autograd.grad(y, [weight, add], towards)
    alone, _ = convolution.convolve_with_moments(x, weight, stride, 1, None, None)
    assert torch.equal(to_add, towards)
    assert torch.equal(to_weight, torch.autograd.grad(alone, weight, towards)[0])


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("slope", [0.0, 1.0])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "kernel", "stride"),
    [(32, 32, 32, 3, 1), (64, 128, 16, 3, 2), (64, 128, 16, 1, 2), (256, 512, 8, 3, 1), (3, 64, 8, 3, 1)],
)
def test_a_convolution_that_is_normalised_with_fixed_statistics(
    inputs: int, outputs: int, size: int, kernel: int, stride: int, added: bool, slope: float, older: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if older:  # what GPUs before Hopper use
        monkeypatch.setattr(triton_tma, "hopper", lambda device: False)
    x, weight = random(10, inputs, size, size), random(2, outputs, inputs, kernel, kernel, seed=2)
    gain, shift = random(2, outputs, seed=3), random(2, outputs, seed=4)
    mean, var = torch.randn(2, outputs, device="cuda"), torch.rand(2, outputs, device="cuda") + 0.5
    var[0, 3] = -1e-9  # as noise may make it; it counts as 0
    exact = plain(x.float(), weight.float(), None, stride, kernel // 2).unflatten(0, (2, -1))
    scale = gain.float() / (var.clamp(min=0) + 1e-5).sqrt()
    exact = (exact - mean[:, None, :, None, None]) * scale[:, None, :, None, None]
    exact = (exact + shift.float()[:, None, :, None, None]).flatten(0, 1)
    add = random(*exact.shape, seed=5) if added else None
    exact = exact if add is None else exact + add.float()
    found = convolution.convolve_and_normalise(
        x, weight, stride, kernel // 2, mean, var, gain, shift, 1e-5, slope, add
    )
    assert close(found, torch.where(exact > 0, exact, slope * exact))


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(64, 64, 1), (64, 128, 2), (32, 64, 2)])
@pytest.mark.parametrize("wide", [True, False])
def test_a_block_that_passes_its_input_on_has_the_plain_gradients(
    inputs: int, outputs: int, stride: int, norm: str, wide: bool, older: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Compares with a block in which PyTorch adds the gradients of the two uses of a tensor."""
    if older:  # what GPUs before Hopper use
        monkeypatch.setattr(triton_tma, "hopper", lambda device: False)
    kind = networks.WideBlock if wide else networks.BasicBlock
    block = kind(inputs, outputs, stride, norm).cuda().bfloat16().train()
    for name, buffer in block.named_buffers():
        buffer.data = buffer.data.float() + (0.5 if "mean" in name else 0)
    following = layers.normalisation("none", outputs)
    state = {name: torch.stack([value, value * 1.1]) for name, value in block.state_dict().items()}
    weights = {name: value.requires_grad_() for name, value in state.items() if "running" not in name}
    x = random(2 * 8, inputs, 16, 16).requires_grad_()

    def gradients() -> tuple[Tensor, ...]:
        more = (None, following) if wide else ()
        out = torch.func.functional_call(block, state | weights, (x, *more))
        out = out[0] if wide else out
        return torch.autograd.grad(out, [x, *weights.values()], random(*out.shape, seed=2))

    ours = gradients()
    monkeypatch.setattr(
        networks, "convolve_activate_and_pass",
        lambda conv, norm, x, slope=0.0: (layers.convolve_and_activate(conv, norm, x, slope=slope), x),
    )  # fmt: skip
    monkeypatch.setattr(
        networks, "activate_and_pass",
        lambda norm, x, slope, sums: (layers.activate(norm, x, slope=slope, sums=sums), x),
    )  # fmt: skip
    for one, other in zip(ours, gradients(), strict=True):
        assert close(one, other.float())


@pytest.mark.parametrize("training", [True, False])
def test_a_networks_batch_norm_is_the_plain_layers(training: bool) -> None:
    layer, x = layers.BatchNorm(32).cuda().train(training), random(6, 32, 8, 8) + 1
    state = {name: torch.stack([value, value + 0.5]) for name, value in layer.state_dict().items()}
    state["running_var"][0, 3] = -1.0  # as noise may make it; it counts as 0
    moved = {}
    for kernels in (True, False):
        convolution.use(kernels)
        try:
            given = dict(state)
            with torch.set_grad_enabled(training):
                out = torch.func.functional_call(layer, given, (x,))
        finally:
            convolution.use(True)
        moved[kernels] = [out, given["running_mean"], given["running_var"]]
    assert close(moved[True][0], moved[False][0].float())
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(moved[True][1:], moved[False][1:], strict=True)
    )


@pytest.mark.parametrize("taken", [None, [3, 1, 2]])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_one_step_of_sgd(momentum: float, nesterov: bool, taken: list[int] | None) -> None:
    """Compares the kernel with torch's SGD, for three models in their second step."""
    from ssfl.models.kernels import triton_sgd

    shape = 3, 8, 3, 3, 700
    weight, velocity = (torch.randn(shape, device="cuda").movedim(-1, 2) for _ in range(2))
    gradient = torch.empty_like(weight, dtype=torch.bfloat16).copy_(random(*weight.shape))
    rates = torch.tensor([[1.0, 1, 1], [0.1, 0.2, 0.3]], device="cuda")
    models, moved = [each.clone().requires_grad_() for each in weight], []
    for model, g, v, rate in zip(models, gradient, velocity, rates[1].tolist(), strict=True):
        model.grad = g.float()
        optimizer = torch.optim.SGD([model], lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=0.01)
        if momentum:
            optimizer.state[model]["momentum_buffer"] = v.clone()
        optimizer.step()
        if momentum:
            moved.append(optimizer.state[model]["momentum_buffer"])
    expected = torch.stack([model.detach() for model in models])
    speed = torch.stack(moved) if momentum else velocity.clone()
    if taken:
        expected[1], speed[1] = weight[1], velocity[1]  # it takes one step only
    narrow = weight.bfloat16()
    step = torch.ones(1, dtype=torch.int64, device="cuda")
    limit = None if taken is None else torch.tensor(taken, device="cuda")
    triton_sgd.update(weight, velocity, gradient, narrow, rates, step, limit, 0.01, momentum, nesterov)
    assert torch.allclose(weight, expected, atol=1e-6)
    assert torch.allclose(velocity, speed, atol=1e-6)
    assert torch.equal(narrow, weight.bfloat16())


@pytest.mark.parametrize("taken", [None, [3, 1]])
@pytest.mark.parametrize("optimizer", [Optimizer(0.9, True, 1e-3), Optimizer(0.0, False, 0.0)])
@pytest.mark.parametrize("without", [None, "bias", "scale"])
def test_a_step_by_kernels_is_the_plain_step(
    optimizer: Optimizer, taken: list[int] | None, without: str | None
) -> None:
    """With gradients in the weights' memory format and in another one, joined vectors, running statistics and
    metrics; and with a weight that has no gradient."""
    shapes = {"bias": (9,), "filters": (8, 4, 3, 3), "point": (5, 7, 1, 1), "scale": (70,)}
    layout = Layout(tuple(shapes), tuple(shapes.values()), (9, 288, 35, 70), 402)

    def made(join: bool) -> StepBuffers:
        generator = torch.Generator("cuda").manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        rows, momentum = draw(2, 402), draw(2, 402)
        kinds = {"weights": torch.float32, "velocity": torch.float32, "narrow": torch.bfloat16}
        joined = buffers._join(layout, rows, 2, kinds) if join else None
        values, speed = layout.unflatten(rows), layout.unflatten(momentum)
        for named in (values, speed):
            named["filters"] = named["filters"].movedim(2, -1).contiguous().movedim(-1, 2)
        made = StepBuffers(
            {name: value.clone() for name, value in values.items()},
            {name: value.clone() for name, value in speed.items()}, {},
            {name: value.bfloat16() for name, value in values.items()}, True,
            {"mean": draw(2, 6)}, None, draw(3, 2).abs(),  # type: ignore[arg-type]
            torch.ones(1, dtype=torch.int64, device="cuda"), {"loss": draw(2)},
            None if taken is None else torch.tensor(taken, device="cuda"), joined,
        )  # fmt: skip
        if joined is not None:
            joined.load(rows, momentum)
            for kind, named in (
                ("weights", made.weights),
                ("velocity", made.velocity),
                ("narrow", made.narrow),
            ):
                named |= joined.parts[kind]
        return made

    slow, fast = made(False), made(True)
    gradients = {
        name: random(*value.shape, seed=7) for name, value in slow.weights.items() if name != without
    }
    statistics, metrics = {"mean": torch.ones(2, 6, device="cuda")}, {"loss": torch.ones(2, device="cuda")}
    sgd(slow, gradients, statistics, metrics, optimizer)
    sgd_by_kernels(fast, gradients, statistics, metrics, optimizer)
    for field in ("weights", "velocity", "statistics", "metrics"):
        for name, value in getattr(slow, field).items():
            assert torch.allclose(getattr(fast, field)[name], value, atol=1e-5), (field, name)
    assert all(torch.equal(fast.narrow[name], value.bfloat16()) for name, value in fast.weights.items())
    assert int(fast.step) == 2


@pytest.mark.parametrize("taken", [None, [3, 1, 2]])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.0, False)])
def test_joined_vectors_take_the_step_of_each(
    momentum: float, nesterov: bool, taken: list[int] | None
) -> None:
    from ssfl.models.kernels import triton_sgd

    shapes: tuple[tuple[int, ...], ...] = ((70,), (3, 4, 2), (9,), (5,), (70,))
    layout = Layout(("a", "filters", "b", "c", "mean"), shapes, (70, 24, 9, 5, 70), 108)
    rows, speed = torch.randn(3, 178, device="cuda"), torch.randn(3, 108, device="cuda")
    kinds = {"weights": torch.float32, "velocity": torch.float32, "narrow": torch.bfloat16}
    joined = buffers._join(layout, rows, 3, kinds)
    assert joined is not None
    assert joined.names == ("a", "b", "c")
    joined.load(rows, speed)
    parts = joined.parts
    apart = {kind: {name: value.clone() for name, value in parts[kind].items()} for kind in kinds}
    before, after = layout.unflatten(rows), layout.unflatten(speed)
    for name in joined.names:
        assert torch.equal(apart["weights"][name], before[name])
        assert torch.equal(apart["velocity"][name], after[name])
        assert torch.equal(apart["narrow"][name], before[name].bfloat16())
    gradients = {name: random(*before[name].shape, seed=7) for name in joined.names}
    rates = torch.tensor([[1.0, 1, 1], [0.1, 0.2, 0.3]], device="cuda")
    step = torch.ones(1, dtype=torch.int64, device="cuda")
    limit = None if taken is None else torch.tensor(taken, device="cuda")
    when = rates, step, limit, 0.01, momentum, nesterov
    memory, flat = joined.memory, torch.cat([value.flatten() for value in gradients.values()])
    triton_sgd.update_joined(
        memory["weights"], memory["velocity"], flat, memory["narrow"], joined.owner, joined.place, *when
    )
    for name, gradient in gradients.items():
        one = [apart[kind][name] for kind in ("weights", "velocity")]
        triton_sgd.update(one[0], one[1], gradient, apart["narrow"][name], *when)
    for kind in kinds:
        for name in joined.names:
            assert torch.equal(parts[kind][name], apart[kind][name]), (kind, name)


def test_a_kernel_that_is_compiled_ahead_is_not_run() -> None:
    from ssfl.models.kernels import launching, triton_sgd

    weight, gradient = torch.ones(2, 77, device="cuda"), torch.full((2, 77), 2.0, device="cuda")
    rates, step = torch.full((1, 2), 0.25, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def run() -> None:
        triton_sgd.update(
            weight, torch.zeros_like(weight), gradient, None, rates, step, None, 0.0, 0.0, False
        )

    launching.compile_ahead(run, 2)
    assert torch.equal(weight, torch.ones_like(weight))
    run()
    assert torch.equal(weight, torch.full_like(weight, 0.5))


def test_what_the_kernels_do_not_take_goes_the_plain_way() -> None:
    wide = torch.randn(4, 32, 8, 8, device="cuda")
    weight = torch.randn(2, 16, 32, 3, 3, device="cuda")
    assert not convolution.suit(wide, weight)
    assert not convolution.suit(wide.bfloat16(), weight[:, :9])
    assert not normalisation.suit(random(1, 64, 200, 200), 32)
    found = layers.convolve(wide, weight, None, 1, 1)
    assert torch.allclose(found, plain(wide, weight, None, 1, 1), atol=1e-3)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, weight = random(2, 16, 8, 8), random(2, 16, 16, 3, 3, seed=2).requires_grad_()
    y = convolution.convolve(x, weight, None, 1, 1).float().square().sum()
    (slope,) = torch.autograd.grad(y, weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="convolve_weights_grad"):
        torch.autograd.grad(slope.float().sum(), weight)
