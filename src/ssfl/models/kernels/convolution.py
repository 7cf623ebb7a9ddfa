"""Convolutions of n models at once, as PyTorch operators with gradients. Their GPU code is in
`triton_conv.py`.

Each model has B images with C channels and H × W pixels. It has O filters of k × k pixels, so its output has
O channels and H' × W' pixels.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ssfl.models.kernels.operators import fake, operator

_use = find_spec("triton") is not None
MULTIPLE = 16
"""The numbers of channels must be multiples of this, because a GPU's tensor cores compute blocks of 16."""
FEW = 4
"""Inputs with at most this many channels are handled by a separate kernel. These are images, the input of a
network's first layer."""


def usable() -> bool:
    """Returns whether the GPU kernels may be used: Triton is installed, and the kernels are not switched
    off."""
    return _use


def use(wanted: bool) -> None:
    """Switches ssfl's GPU kernels on or off for this process. They are switched off if they fail."""
    global _use
    _use = wanted


def suit(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the GPU kernels can compute a convolution, and are not switched off. Images x are [n ·
    B, C, H, W], and filters `weight` are [n, O, C, k, k].

    x must be bfloat16 on a GPU. O and C, the numbers of channels, must be multiples of 16, but C may also be
    at most `FEW`. The number of pixels of one model's images, times the larger of C and O, must be below
    about 2³¹. The reason is that the kernels use 32-bit offsets.
    """
    inputs, outputs = weight.shape[2], weight.shape[1]
    fit = outputs % MULTIPLE == 0 and (inputs % MULTIPLE == 0 or inputs <= FEW)
    pixels = x.numel() // (len(weight) * inputs)
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and fit
        and (pixels + MULTIPLE * x.shape[3]) * max(inputs, outputs) < 2**31
        and _use
    )


def pixels_first(x: Tensor) -> Tensor:
    """Returns images or filters [..., C, H, W] as [..., H, W, C], contiguous in memory, which is the order
    that the kernels need."""
    return x.movedim(-3, -1).contiguous()


def _out(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


@operator("ssfl::convolve")
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Returns the convolutions of n models at once, [n · B, O, H', W']. Images are [n · B, C, H, W], filters
    [n, O, C, k, k] and biases [n, O]. Each model's B images are convolved with its own filters."""
    from ssfl.models.kernels import triton_conv

    if weight.shape[2] <= FEW:
        out = triton_conv.first(x.contiguous(), weight.contiguous(), bias, stride, padding)
    else:
        out = triton_conv.correlate(pixels_first(x), pixels_first(weight), bias, stride, padding)
    return out.movedim(-1, -3)


@fake("ssfl::convolve")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    size = [_out(s, weight.shape[-1], stride, padding) for s in x.shape[2:]]
    return x.new_empty(x.shape[0], *size, weight.shape[1]).movedim(-1, -3)


@operator("ssfl::convolve_with_moments")
def convolve_with_moments(
    x: Tensor, weight: Tensor, stride: int, padding: int, level: Tensor | None, add: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the same as `convolve`, without bias, plus `add` [n · B, O, H', W'] if that is not None.

    Also returns sums with which `batch_norm` computes its statistics, so that it need not read the images for
    this. They are sums over the result minus `level` [n, O]. They are empty if `level` is None, or if the
    kernel does not compute them. No gradient flows through them.
    """
    from ssfl.models.kernels import triton_conv

    summand, sums = None if add is None else pixels_first(add), None
    if weight.shape[2] <= FEW:
        out = triton_conv.first(x.contiguous(), weight.contiguous(), None, stride, padding)
        out = out if summand is None else out.add_(summand)
    else:
        out, sums = triton_conv.correlate_with_moments(
            pixels_first(x), pixels_first(weight), None, stride, padding,
            None if level is None else level.contiguous(), summand,
        )  # fmt: skip
    return out.movedim(-1, -3), x.new_empty(0, dtype=torch.float32) if sums is None else sums


@fake("ssfl::convolve_with_moments")
def _(
    x: Tensor, weight: Tensor, stride: int, padding: int, level: Tensor | None, add: Tensor | None
) -> tuple[Tensor, Tensor]:
    size = [_out(s, weight.shape[-1], stride, padding) for s in x.shape[2:]]
    sums = x.new_empty(0, dtype=torch.float32)
    return x.new_empty(x.shape[0], *size, weight.shape[1]).movedim(-1, -3), sums


@operator("ssfl::convolve_and_normalise", gradient=False)
def convolve_and_normalise(
    x: Tensor, weight: Tensor, stride: int, padding: int, mean: Tensor, var: Tensor, gain: Tensor,
    shift: Tensor, eps: float, slope: float, add: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns the same as `convolve`, without bias, after batch normalisation and activation, as in
    evaluation mode. `mean`, `var` and the layer's parameters `gain` and `shift` are [n, O]; `eps` is the
    constant that is added to the variance. The activation is a leaky ReLU with the negative slope `slope`. If
    `add` is not None, it is added before the activation. There is no gradient."""
    from ssfl.models.kernels import triton_batch, triton_conv

    norm = triton_batch.Fixed(
        mean.contiguous(), var.contiguous(), gain.contiguous(), shift.contiguous(), eps, slope
    )
    summand = None if add is None else pixels_first(add)
    if weight.shape[2] <= FEW:
        joined = norm if summand is None else None
        out = triton_conv.first(x.contiguous(), weight.contiguous(), None, stride, padding, norm=joined)
        out = out if joined else triton_batch.forward(out, *norm[:4], summand, eps, slope)
    else:
        images, filters = pixels_first(x), pixels_first(weight)
        out = triton_conv.correlate_and_normalise(images, filters, stride, padding, norm, summand)
    return out.movedim(-1, -3)


@fake("ssfl::convolve_and_normalise")
def _(
    x: Tensor, weight: Tensor, stride: int, padding: int, mean: Tensor, var: Tensor, gain: Tensor,
    shift: Tensor, eps: float, slope: float, add: Tensor | None,
) -> Tensor:  # fmt: skip
    size = [_out(s, weight.shape[-1], stride, padding) for s in x.shape[2:]]
    return x.new_empty(x.shape[0], *size, weight.shape[1]).movedim(-1, -3)


@operator("ssfl::convolve_images_grad", gradient=False)
def _images_grad(
    grad: Tensor, weight: Tensor, size: list[int], stride: int, padding: int, add: Tensor | None
) -> Tensor:
    from ssfl.models.kernels import triton_conv

    summand = None if add is None else pixels_first(add)
    filters = pixels_first(weight)
    return triton_conv.spread(pixels_first(grad), filters, size, stride, padding, add=summand).movedim(-1, -3)


@fake("ssfl::convolve_images_grad")
def _(grad: Tensor, weight: Tensor, size: list[int], stride: int, padding: int, add: Tensor | None) -> Tensor:
    return grad.new_empty(grad.shape[0], *size, weight.shape[2]).movedim(-1, -3)


@operator("ssfl::convolve_weights_grad", gradient=False)
def _weights_grad(grad: Tensor, x: Tensor, models: int, kernel: int, stride: int, padding: int) -> Tensor:
    from ssfl.models.kernels import triton_conv

    few = x.shape[1] <= FEW
    x = x.contiguous() if few else pixels_first(x)
    grad_weight = triton_conv.weights_grad(pixels_first(grad), x, few, models, kernel, stride, padding)
    return grad_weight if few else grad_weight.movedim(-1, -3)


@fake("ssfl::convolve_weights_grad")
def _(grad: Tensor, x: Tensor, models: int, kernel: int, stride: int, padding: int) -> Tensor:
    if x.shape[1] <= FEW:
        return grad.new_empty(models, grad.shape[1], x.shape[1], kernel, kernel)
    return grad.new_empty(models, grad.shape[1], kernel, kernel, x.shape[1]).movedim(-1, -3)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, add: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of a convolution with respect to images and filters; None if not needed. If `add`
    is not None, it is added to the gradient of the images."""
    to_x = to_weight = None
    if ctx.needs_input_grad[0]:
        if weight.shape[2] <= FEW:
            raise NotImplementedError("no gradient for pictures")
        to_x = _images_grad(grad, weight, list(x.shape[2:]), ctx.stride, ctx.padding, add)
    if ctx.needs_input_grad[1]:
        to_weight = _weights_grad(grad, x, len(weight), weight.shape[-1], ctx.stride, ctx.padding)
    return to_x, to_weight


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    x, weight = ctx.saved_tensors
    to_x, to_weight = _gradients(ctx, grad, x, weight)
    to_bias = None
    if ctx.needs_input_grad[2]:
        to_bias = grad.unflatten(0, (len(weight), -1)).sum((1, 3, 4), dtype=torch.float32).to(grad.dtype)
    return to_x, to_weight, to_bias, None, None


torch.library.register_autograd("ssfl::convolve", _backward, setup_context=_remember)


def _remember_with_moments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.stride, ctx.padding, _, _ = inputs
    ctx.set_materialize_grads(False)  # no zeros as gradients of the sums
    ctx.save_for_backward(x, weight)


def _backward_with_moments(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    to_x, to_weight = _gradients(ctx, grad, x, weight)
    return to_x, to_weight, None, None, None, grad if ctx.needs_input_grad[5] else None


torch.library.register_autograd(
    "ssfl::convolve_with_moments", _backward_with_moments, setup_context=_remember_with_moments
)


class ConvolveAndPass(torch.autograd.Function):
    """`convolve_with_moments` (without `add`) for images that are also used elsewhere, such as in a residual
    block. It returns the images, too. If this result is used there, a kernel adds both gradients of the
    images while it computes one of them. Otherwise PyTorch adds them, in one more pass over the images."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, level: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.stride, ctx.padding = stride, padding
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        y, sums = convolve_with_moments(x, weight, stride, padding, level, None)
        ctx.mark_non_differentiable(sums)
        return y, sums, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, _, passed = grads
        if grad is None:
            return passed, None, None, None, None
        x, weight = ctx.saved_tensors
        return *_gradients(ctx, grad, x, weight, passed), None, None, None
