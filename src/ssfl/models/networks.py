"""The built-in networks by name, each with a choice of normalisation.

Every network is called as `model(images, key)`. Images are normalised floats [B, C, H, W]. `key` determines
the dropout masks; only `cnn` needs it, in training mode. Layers with parameters come from `layers.py`, so
that every network can also run as n models at once.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssfl.errors import ConfigError
from ssfl.models.kernels import stem
from ssfl.models.layers import (
    Conv2d,
    Linear,
    activate,
    activate_and_pass,
    convolve_activate_and_pass,
    convolve_and_activate,
    convolve_and_add,
    dropout,
    dropout_factors,
    normalisation,
)

DROPOUT = 0.25
"""The probability with which the network `cnn` sets a channel of an image to zero in training."""


class Small(nn.Module):
    """A network of two convolutions for very small images, such as the 8×8 digits. It uses a stride instead
    of pooling."""

    def __init__(self, classes: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = Conv2d(channels, 16, 3, padding=1)
        self.norm1 = normalisation(norm, 16)
        self.conv2 = Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2 = normalisation(norm, 32)
        self.fc = Linear(32 * -(-height // 2) * -(-width // 2), classes)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        x = activate(self.norm1, self.conv1(x))
        x = activate(self.norm2, self.conv2(x))
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


class Cnn(nn.Module):
    """The network that the paper (Zhang et al. 2020) uses for EMNIST. Without normalisation, it has 1,204,655
    parameters for images of 28×28 pixels and 47 classes."""

    def __init__(self, classes: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = Conv2d(channels, 32, 3)
        self.norm1 = normalisation(norm, 32)
        self.conv2 = Conv2d(32, 64, 3)
        self.norm2 = normalisation(norm, 64)
        self.fc1 = Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.fc2 = Linear(128, classes)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if self.training and key is None:
            raise ValueError("cnn has dropout: in training mode, call it as model(images, key)")
        x = self._features(x, key if self.training else None).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))  # type: ignore[no-any-return]

    def _features(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Returns the result of the two convolutions, pooling and dropout; without a key there is no
        dropout. ssfl's GPU kernels compute it in few passes over the images."""
        first, second = self.conv1, self.conv2
        if isinstance(self.norm1, nn.Identity) and stem.fits(x, first.weight, second.weight):
            factors = None
            if key is not None:
                factors = dropout_factors(len(x), second.out_channels, DROPOUT, key, x.dtype)
            assert first.bias is not None
            assert second.bias is not None
            out, _, _ = stem.stem(x, first.weight, first.bias, second.weight, second.bias, factors)
            return out
        x = activate(self.norm1, first(x))
        x = F.max_pool2d(self.norm2(second(x)), 2)
        return F.relu(x if key is None else dropout(x, DROPOUT, key))


class BasicBlock(nn.Module):
    """The residual block of ResNet-18: two 3×3 convolutions, whose result is added to the input (He et al.
    2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = normalisation(norm, outputs)
        self.conv2 = Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = normalisation(norm, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(normalisation(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        out, short = convolve_activate_and_pass(self.conv1, self.norm1, x)
        if len(self.shortcut):
            conv, norm = self.shortcut
            assert isinstance(conv, Conv2d)
            short = convolve_and_activate(conv, norm, short, slope=1.0)
        return convolve_and_activate(self.conv2, self.norm2, out, add=short)


class ResNet18(nn.Module):
    """ResNet-18 for images of about 32 pixels: the first convolution is 3×3 and no pooling follows it. With
    normalisation and 10 classes, it has 11,173,962 parameters."""

    def __init__(self, classes: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        self.in_kernels = norm != "none"
        """Whether ssfl's GPU kernels do nearly all its work, so that there is little to compile."""
        self.conv = Conv2d(shape[0], 64, 3, 1, 1, bias=False)
        self.norm = normalisation(norm, 64)
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        strides = [1, 1, 2, 1, 2, 1, 2, 1]
        self.blocks = nn.Sequential(
            *(BasicBlock(a, b, s, norm) for a, b, s in zip(widths, widths[1:], strides, strict=False))
        )
        self.fc = Linear(512, classes)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        x = self.blocks(convolve_and_activate(self.conv, self.norm, x))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class ResNet9(nn.Module):
    """ResNet-9: four convolutions with many channels, and two residual blocks of two convolutions each. With
    normalisation and 10 classes, it has 6,575,370 parameters."""

    def __init__(self, classes: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
            parts = [Conv2d(inputs, outputs, 3, padding=1), normalisation(norm, outputs)]
            return nn.Sequential(*parts, nn.ReLU(), *([nn.MaxPool2d(2)] if pool else []))

        self.stem = nn.Sequential(layer(shape[0], 64), layer(64, 128, pool=True))
        self.pair1 = nn.Sequential(layer(128, 128), layer(128, 128))
        self.middle = nn.Sequential(layer(128, 256, pool=True), layer(256, 512, pool=True))
        self.pair2 = nn.Sequential(layer(512, 512), layer(512, 512))
        self.fc = Linear(512, classes)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        x = self.middle(x + self.pair1(x))
        x = x + self.pair2(x)
        return self.fc(x.amax((2, 3)))  # type: ignore[no-any-return]


class Vgg11(nn.Module):
    """VGG-11 for images of about 96 pixels, with three fully connected layers at the end. With normalisation
    and 10 classes, it has 11,653,770 parameters for 96×96 pixels."""

    def __init__(self, classes: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels, height, width = shape
        for width_out, pool in [
            (64, True), (128, True), (256, False), (256, True),
            (512, False), (512, True), (512, False), (512, True),
        ]:  # fmt: skip
            layers += [Conv2d(channels, width_out, 3, padding=1), normalisation(norm, width_out)]
            layers.append(nn.ReLU())
            if pool:
                layers.append(nn.MaxPool2d(2, ceil_mode=True))
                height, width = (height + 1) // 2, (width + 1) // 2
            channels = width_out
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(), Linear(512 * height * width, 512), normalisation(norm, 512), nn.ReLU(),
            Linear(512, 128), nn.ReLU(), Linear(128, classes),
        )  # fmt: skip

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class WideBlock(nn.Module):
    """The residual block of a Wide-ResNet: normalisation, activation and convolution, twice (Zagoruyko and
    Komodakis 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, slope: float = 0.1) -> None:
        super().__init__()
        self.slope = slope
        self.norm1 = normalisation(norm, inputs)
        self.conv1 = Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = normalisation(norm, outputs)
        self.conv2 = Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor, sums: Tensor | None, following: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Returns the block's result. Also returns the sums that a GPU kernel computes with it for the
        normalisation `following` the block, and gets those for its own first normalisation; None if there are
        none."""
        out, short = activate_and_pass(self.norm1, x, slope=self.slope, sums=sums)
        if isinstance(self.shortcut, nn.Identity):
            out = convolve_and_activate(self.conv1, self.norm2, out, slope=self.slope)
        else:
            out, again = convolve_activate_and_pass(self.conv1, self.norm2, out, slope=self.slope)
            short = self.shortcut(again)
        return convolve_and_add(self.conv2, out, short, following)


class WideResNet(nn.Module):
    """Wide-ResNet-28-2 (28 layers, twice the usual width). FixMatch and many later federated methods use this
    network."""

    slope = 0.1
    """The slope of the activation for negative numbers."""

    def __init__(self, classes: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        self.in_kernels = norm != "none"
        self.conv = Conv2d(shape[0], 16, 3, 1, 1, bias=False)
        blocks: list[nn.Module] = []
        for inputs, outputs, stride in [(16, 32, 1), (32, 64, 2), (64, 128, 2)]:
            blocks.append(WideBlock(inputs, outputs, stride, norm, self.slope))
            blocks += [WideBlock(outputs, outputs, 1, norm, self.slope) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = normalisation(norm, 128)
        self.fc = Linear(128, classes)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        x, sums = self.conv(x), None
        blocks = list(self.blocks)
        norms = [*(block.norm1 for block in blocks[1:]), self.norm]
        for block, following in zip(blocks, norms, strict=True):
            x, sums = block(x, sums, following)
        x = activate(self.norm, x, slope=self.slope, sums=sums)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class WideResNetRelu(WideResNet):
    """Wide-ResNet-28-2 as SemiFL's authors use it: with ReLU, initial filters from normal distributions (He
    et al. 2015, by the number of outputs), and a last layer without initial bias."""

    slope = 0.0

    def __init__(self, classes: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__(classes, shape, norm)
        for layer in self.modules():
            if isinstance(layer, Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)


MODELS = {
    "small": Small,
    "cnn": Cnn,
    "resnet9": ResNet9,
    "resnet18": ResNet18,
    "vgg11": Vgg11,
    "wide_resnet": WideResNet,
    "wide_resnet_relu": WideResNetRelu,
}
SMALLEST = {
    "small": 4,
    "cnn": 8,
    "resnet9": 8,
    "resnet18": 8,
    "vgg11": 16,
    "wide_resnet": 8,
    "wide_resnet_relu": 8,
}


def suited(shape: tuple[int, int, int], gpu: bool) -> str:
    """Returns the name of the default network for images of this shape (channels, height, width). Without a
    GPU, it is a network that a CPU can train in reasonable time."""
    pixels = min(shape[1:])
    if pixels < 16:
        return "small"
    if pixels <= 28 and shape[0] == 1:
        return "cnn"
    if not gpu:  # the size and the time of cnn grow with the number of pixels
        return "cnn" if shape[1] * shape[2] <= 64 * 64 else "small"
    return "resnet18" if pixels <= 64 else "vgg11"


def build(name: str, classes: int, shape: tuple[int, int, int], norm: str, seed: int = 1) -> nn.Module:
    """Returns the built-in network `name` for images of this shape (channels, height, width). `norm` is the
    setting model.norm. The network's initial weights are drawn as PyTorch does by default, and depend only on
    the seed. Raises ConfigError if the images are too small."""
    if min(shape[1:]) < SMALLEST[name]:
        raise ConfigError(
            f"model.name = {name!r} needs images of at least {SMALLEST[name]} pixels a side, and these have "
            f"{shape[1]}×{shape[2]}: set model.name=small",
            key="model.name",
            value=name,
            fix="model.name=small",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](classes, shape, norm)
