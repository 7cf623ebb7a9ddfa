"""The layers with parameters of which the built-in networks consist. They compute one model, or n models at
once.

With its own parameters, a network of these layers is one ordinary PyTorch model. If
`torch.func.functional_call` passes parameters with one more dimension, [n, ...], it is n models. The images
of the n models come one after another in the batch, [n · B, C, H, W]. So everything between these layers
(activations, pooling, sums) works without changes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssfl.core import draws
from ssfl.models.kernels import convolution
from ssfl.models.kernels import normalisation as fused


class Conv2d(nn.Conv2d):
    """A convolution with a square kernel, without dilation or groups, of one model or of n models at once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 4:
            return super().forward(x)
        return convolve(x, self.weight, self.bias, self.stride[0], int(self.padding[0]))


class Linear(nn.Linear):
    """A fully connected layer of one model or of n models at once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(x)
        inputs = x.reshape(len(self.weight), -1, x.shape[-1])
        # with this order of factors, the gradient has the same memory format as the weights
        return torch.baddbmm(self.bias[:, :, None], self.weight, inputs.mT).mT.flatten(0, 1)


class GroupNorm(nn.GroupNorm):
    """Group normalisation of [B, C, ...], which normalises each image by itself. It works for one model or
    for n models at once, and computes its statistics in at least float32."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return super().forward(x)
        models = len(self.weight)
        if fused.suit(x, self.num_groups):
            return fused.group_norm(x, self.weight, self.bias, None, self.num_groups, self.eps, 1.0)
        if not x.is_cuda:
            parts = zip(x.chunk(models), self.weight, self.bias, strict=True)
            return torch.cat([F.group_norm(part, self.num_groups, w, b, self.eps) for part, w, b in parts])
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        grouped = wide.unflatten(1, (self.num_groups, -1))
        var, mean = torch.var_mean(grouped, list(range(2, grouped.dim())), correction=0, keepdim=True)
        even = ((grouped - mean) * torch.rsqrt(var + self.eps)).flatten(1, 2).unflatten(0, (models, -1))
        scale, shift = (_per_channel(value, x.dim()) for value in (self.weight, self.bias))
        return (even * scale + shift).to(x.dtype).flatten(0, 1)  # type: ignore[no-any-return]


class BatchNorm(nn.Module):
    """Batch normalisation of [B, C, ...] that replaces its running statistics by new tensors instead of
    changing them in place.

    torch's own layer writes into its buffers. Without such side effects, n models can be trained at once. The
    results are those of `torch.nn.BatchNorm2d`.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Tensor) -> Tensor:
        if self.suits(x):
            return self.activated(x, None, 1.0)
        models = 1 if self.weight.dim() == 1 else len(self.weight)
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(0, (models, -1))
        if self.training:
            var, mean = torch.var_mean(wide, [1, *range(3, wide.dim())], correction=0)
            var, mean = var.view_as(self.weight), mean.view_as(self.weight)
            count = wide.numel() // mean.numel()
            unbiased = var.detach() * (count / max(count - 1, 1))
            self.running_mean = self.running_mean.lerp(mean.detach(), self.momentum)
            self.running_var = self.running_var.lerp(unbiased, self.momentum)
        else:  # the noise of [privacy], or an attacker, may make a variance negative
            mean, var = self.running_mean, self.running_var.clamp(min=0)
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        scale, shift = (_per_channel(value.reshape(models, -1), x.dim()) for value in (scale, shift))
        return (wide * scale + shift).to(x.dtype).flatten(0, 1)  # type: ignore[no-any-return]

    def suits(self, x: Tensor) -> bool:
        """Returns whether ssfl's GPU kernels can normalise these images. Otherwise plain PyTorch functions
        are used. In evaluation mode, the kernels compute no gradients."""
        known = self.training or not torch.is_grad_enabled()
        return known and self.weight.dim() == 2 and fused.suit_batch(x, len(self.weight))

    def activated(self, x: Tensor, add: Tensor | None, slope: float, sums: Tensor | None = None) -> Tensor:
        """Returns activation(norm(x) + add), computed by ssfl's GPU kernels in one pass over the images. The
        activation is a leaky ReLU with this negative `slope`; 0 is ReLU, and 1 is none. In training mode, it
        updates the running statistics. `sums` are what a convolution computed for this norm, if it did."""
        running = self.running_mean, self.running_var
        if not self.training:
            return fused.batch_norm_fixed(x, self.weight, self.bias, add, *running, self.eps, slope)
        y, _, _, mean, var = fused.batch_norm(
            x, self.weight, self.bias, add, *running, self.momentum, self.eps, slope, sums
        )
        self.running_mean, self.running_var = mean.detach(), var.detach()
        return y

    def activated_and_passed(self, x: Tensor, slope: float, sums: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns `activated` of x, and x itself for its other use (see `activate_and_pass`). Only for
        training mode."""
        y, _, _, mean, var, x = fused.BatchNormAndPass.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var,
            self.momentum, self.eps, slope, sums,
        )  # fmt: skip
        self.running_mean, self.running_var = mean, var
        return y, x


def normalisation(norm: str, channels: int) -> nn.Module:
    """Returns the normalisation layer for the setting model.norm: GroupNorm for "group", BatchNorm for
    "batch", and a layer that changes nothing for "none". GroupNorm gets at most 32 groups, each of at least
    two channels."""
    if norm == "group":
        return GroupNorm(min(32, channels // 2), channels)
    return BatchNorm(channels) if norm == "batch" else nn.Identity()


def dropout(x: Tensor, rate: float, keys: Tensor) -> Tensor:
    """Returns images in which whole channels are set to zero at random, each with the probability `rate`. The
    other channels are divided by 1 - `rate`. `keys` has one key for each model, which determines the model's
    random mask."""
    return x * dropout_factors(len(x), x.shape[1], rate, keys, x.dtype)[:, :, None, None]


def dropout_factors(images: int, channels: int, rate: float, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the factors by which `dropout` multiplies channels, [images, channels]: 0 or 1 / (1 -
    `rate`)."""
    mask = draws.uniform(draws.bits(keys, images * channels // keys.numel())) >= rate
    return mask.reshape(images, channels).to(dtype) / (1 - rate)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Returns the convolutions of n models at once, [n · B, O, H', W']. Images are [n · B, C, H, W]; each
    model's B images are convolved with its own filters, `weight` [n, O, C, k, k]."""
    models = len(weight)
    if convolution.suit(x, weight):
        return convolution.convolve(x, weight, bias, stride, padding)
    if x.is_cuda:  # one convolution with n groups of channels, one for each model
        side = x.unflatten(0, (models, -1)).transpose(0, 1).flatten(1, 2)
        out = F.conv2d(side, weight.flatten(0, 1), None, stride, padding, groups=models)
        out = out.unflatten(1, (models, -1)).transpose(0, 1)
        return (out if bias is None else out + _per_channel(bias, 4)).flatten(0, 1)  # type: ignore[no-any-return]
    # on a CPU, one model after another is fastest
    biases = [None] * models if bias is None else bias.unbind()
    parts = zip(x.chunk(models), weight.unbind(), biases, strict=True)
    return torch.cat([F.conv2d(*part, stride, padding) for part in parts])


def activate(
    norm: nn.Module, x: Tensor, add: Tensor | None = None, slope: float = 0.0, sums: Tensor | None = None
) -> Tensor:
    """Returns activation(norm(x) + add); nothing is added if `add` is None. The activation is ReLU, or a
    leaky ReLU with the negative slope `slope` if this is not 0; 1 means none. Where ssfl's GPU kernels can be
    used, they compute everything in one pass over the images. `sums` are what `convolve_and_add` returned
    with x."""
    if isinstance(norm, GroupNorm) and norm.weight.dim() == 2 and fused.suit(x, norm.num_groups):
        return fused.group_norm(x, norm.weight, norm.bias, add, norm.num_groups, norm.eps, slope)
    if isinstance(norm, BatchNorm) and norm.suits(x):
        return norm.activated(x, add, slope, sums)
    x = norm(x)
    x = x if add is None else x + add
    if slope == 1:
        return x
    return F.leaky_relu(x, slope) if slope else F.relu(x)


def convolve_and_activate(
    conv: Conv2d, norm: nn.Module, x: Tensor, add: Tensor | None = None, slope: float = 0.0
) -> Tensor:
    """Returns `activate` of the convolution of x. For batch normalisation, ssfl's GPU kernels compute its
    statistics together with the convolution. In evaluation mode, they compute everything together. This saves
    passes over the images."""
    level = _level(norm)
    if (
        isinstance(norm, BatchNorm)
        and not norm.training
        and not torch.is_grad_enabled()
        and _with_kernels(conv, x)
    ):
        return convolution.convolve_and_normalise(
            x, conv.weight, conv.stride[0], int(conv.padding[0]), norm.running_mean, norm.running_var,
            norm.weight, norm.bias, norm.eps, slope, add,
        )  # fmt: skip
    if level is not None and _with_kernels(conv, x):
        y, sums = convolution.convolve_with_moments(
            x, conv.weight, conv.stride[0], int(conv.padding[0]), level, None
        )
        return activate(norm, y, add, slope, sums)
    return activate(norm, conv(x), add, slope)


def convolve_activate_and_pass(
    conv: Conv2d, norm: nn.Module, x: Tensor, slope: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the same as `convolve_and_activate`, and x itself. Use this x wherever x is needed again, such
    as for the shortcut of a residual block. Then ssfl's GPU kernels add the gradients of both uses without a
    further pass over the images."""
    if torch.is_grad_enabled() and x.requires_grad and _with_kernels(conv, x):
        y, sums, x = convolution.ConvolveAndPass.apply(
            x, conv.weight, conv.stride[0], int(conv.padding[0]), _level(norm)
        )
        return activate(norm, y, slope=slope, sums=sums), x
    return convolve_and_activate(conv, norm, x, slope=slope), x


def activate_and_pass(
    norm: nn.Module, x: Tensor, slope: float = 0.0, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns activation(norm(x)), and x itself. As with `convolve_activate_and_pass`, use this x wherever x
    is needed again."""
    trains = norm.training and torch.is_grad_enabled() and x.requires_grad
    if trains and isinstance(norm, BatchNorm) and norm.suits(x) and not torch.compiler.is_compiling():
        return norm.activated_and_passed(x, slope, sums)
    return activate(norm, x, slope=slope, sums=sums), x


def convolve_and_add(
    conv: Conv2d, x: Tensor, add: Tensor, following: nn.Module
) -> tuple[Tensor, Tensor | None]:
    """Returns the convolution of x plus `add`. Where ssfl's GPU kernels can be used, they compute both in one
    pass over the images. If batch normalisation follows (the layer `following`), they also compute the sums
    for its statistics: the second result, for `activate`. Otherwise this is None."""
    if _with_kernels(conv, x):
        return convolution.convolve_with_moments(
            x, conv.weight, conv.stride[0], int(conv.padding[0]), _level(following), add
        )
    return conv(x) + add, None


def _with_kernels(conv: Conv2d, x: Tensor) -> bool:
    """Returns whether ssfl's GPU kernels compute this convolution together with what follows it. They do not
    in code that torch compiles."""
    several = conv.weight.dim() == 5 and conv.bias is None and not torch.compiler.is_compiling()
    return several and convolution.suit(x, conv.weight)


def _level(norm: nn.Module) -> Tensor | None:
    """Returns the level above which a convolution adds up its results for this layer. None if the layer needs
    no sums."""
    return norm.running_mean if isinstance(norm, BatchNorm) and norm.training else None


def _per_channel(values: Tensor, dims: int) -> Tensor:
    """Returns values [n, C] reshaped so that they multiply the images of n models, [n, B, C, ...]. `dims` is
    the number of dimensions of one model's images [B, C, ...]."""
    return values.reshape(len(values), 1, -1, *[1] * (dims - 2))
