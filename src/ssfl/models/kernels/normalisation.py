"""Normalisation, addition of a tensor and activation of n models, together as one PyTorch operator with
gradients. This reads the images fewer times than three operators would.

The GPU code is in `triton_norm.py` (group norm) and `triton_batch.py` (batch norm).
"""

from typing import Any

import torch
from torch import Tensor

from ssfl.models.kernels.convolution import MULTIPLE, pixels_first, usable
from ssfl.models.kernels.operators import fake, operator

LARGEST = 32768
"""The largest number of values that a Triton program can hold at once. For the group norm kernel, one group
of channels of one image must not have more values."""


def _power(value: int) -> int:
    """Returns the smallest power of two that is at least this value, because Triton's tile sizes must be
    powers of two."""
    return 1 << (value - 1).bit_length()


def suit(x: Tensor, groups: int) -> bool:
    """Returns whether the group norm kernel can normalise these images [n · B, C, H, W]. They must be
    bfloat16 on a GPU, and the numbers of channels and groups must be powers of two. A group of channels must
    be small enough for one Triton program."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and x.dim() == 4 and usable()):
        return False
    members = x.shape[1] // groups
    even = x.shape[1] == _power(x.shape[1]) and groups == _power(groups)
    return even and _power(x.shape[2] * x.shape[3]) * members <= LARGEST


@operator("ssfl::group_norm")
def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, groups: int, eps: float, slope: float
) -> Tensor:
    """Returns max(y, slope · y), where y = group_norm(x) + add, for n models at once: group normalisation,
    addition and activation. Images are [n · B, C, H, W]; weight and bias are [n, C]. If `add` is None,
    nothing is added. `eps` is the constant that is added to the variance."""
    from ssfl.models.kernels import triton_norm

    summand = None if add is None else pixels_first(add)
    out = triton_norm.forward(
        pixels_first(x), weight.contiguous(), bias.contiguous(), summand, groups, eps, slope
    )
    return out.movedim(-1, -3)


@fake("ssfl::group_norm")
def _(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, groups: int, eps: float, slope: float
) -> Tensor:
    return x.new_empty(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, -3)


@operator("ssfl::group_norm_grad", gradient=False)
def _grad(
    grad: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor,
    groups: int, eps: float, slope: float, added: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ssfl.models.kernels import triton_norm

    to_x, to_add, to_weight, to_bias = triton_norm.backward(
        pixels_first(grad), pixels_first(x), pixels_first(y), weight.contiguous(), bias.contiguous(),
        groups, eps, slope, added,
    )  # fmt: skip
    return to_x.movedim(-1, -3), to_add.movedim(-1, -3) if added else to_add, to_weight, to_bias


@fake("ssfl::group_norm_grad")
def _(
    grad: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor,
    groups: int, eps: float, slope: float, added: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _like_grads(x, weight, bias, added)


def _like_grads(
    x: Tensor, weight: Tensor, bias: Tensor, added: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns tensors with the shapes of the gradients of x, the added tensor, weight and bias, for torch's
    compiler."""
    to_x, to_add = (x.new_empty(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, -3) for _ in range(2))
    parameters = (each.new_empty(each.shape) for each in (weight, bias))
    return (to_x, to_add if added else x.new_empty(0), *parameters)  # type: ignore[return-value]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, add, ctx.groups, ctx.eps, ctx.slope = inputs
    ctx.added = add is not None
    ctx.save_for_backward(x, output, weight, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, weight, bias = ctx.saved_tensors
    to_x, to_add, scale, shift = _grad(grad, x, y, weight, bias, ctx.groups, ctx.eps, ctx.slope, ctx.added)
    return to_x, scale, shift, to_add if ctx.added else None, None, None, None


torch.library.register_autograd("ssfl::group_norm", _backward, setup_context=_remember)


def suit_batch(x: Tensor, models: int) -> bool:
    """Returns whether the batch norm kernels can normalise the images of n models, [n · B, C, H, W]. They
    must be bfloat16 on a GPU, with a multiple of 16 channels, and not too large (see `offsets_fit`)."""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and x.dim() == 4 and x.shape[1] % MULTIPLE == 0
    return fits and offsets_fit(x, models) and usable()


def offsets_fit(x: Tensor, models: int) -> bool:
    """Returns whether the images of one model have fewer than 2³¹ values in total. The kernels need this,
    because they compute offsets in 32-bit integers. Larger batches are normalised without the kernels."""
    return x.numel() // models < 2**31


@operator("ssfl::batch_norm")
def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float, slope: float, sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns max(y, slope · y), where y = batch_norm(x) + add, for n models at once: batch normalisation,
    addition and activation. Images are [n · B, C, H, W]; weight and bias are [n, C]. If `add` is None,
    nothing is added. `eps` is the constant that is added to the variance.

    Also returns the mean and the variance of each model's channels, and the new running mean and variance,
    [n, C] each. `momentum` is the weight of this batch in the running statistics. No gradient flows through
    these four.

    `sums` are what `convolve_with_moments` returned with x, for the level `running_mean`; None or empty if x
    was computed otherwise.
    """
    from ssfl.models.kernels import triton_batch

    images, summand = pixels_first(x), None if add is None else pixels_first(add)
    mean, var, new_mean, new_var = triton_batch.statistics(
        images, running_mean.contiguous(), running_var.contiguous(), momentum,
        None if sums is None or not sums.numel() else sums,
    )  # fmt: skip
    out = triton_batch.forward(images, mean, var, weight.contiguous(), bias.contiguous(), summand, eps, slope)
    return out.movedim(-1, -3), mean, var, new_mean, new_var


@fake("ssfl::batch_norm")
def _(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float, slope: float, sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    each = (x.new_empty(weight.shape, dtype=torch.float32) for _ in range(4))
    return (x.new_empty(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, -3), *each)  # type: ignore[return-value]


@operator("ssfl::batch_norm_fixed", gradient=False)
def batch_norm_fixed(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, mean: Tensor, var: Tensor,
    eps: float, slope: float,
) -> Tensor:  # fmt: skip
    """Returns the same as `batch_norm`, but normalises with the given mean and variance, [n, C] each, as in
    evaluation mode. It has no gradient."""
    from ssfl.models.kernels import triton_batch

    out = triton_batch.forward(
        pixels_first(x), mean.contiguous(), var.contiguous(), weight.contiguous(), bias.contiguous(),
        None if add is None else pixels_first(add), eps, slope,
    )  # fmt: skip
    return out.movedim(-1, -3)


@fake("ssfl::batch_norm_fixed")
def _(
    x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, mean: Tensor, var: Tensor,
    eps: float, slope: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, -3)


@operator("ssfl::batch_norm_grad", gradient=False)
def _batch_grad(
    grad: Tensor, x: Tensor, y: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor,
    eps: float, slope: float, added: bool, passed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ssfl.models.kernels import triton_batch

    to_x, to_add, to_weight, to_bias = triton_batch.backward(
        pixels_first(grad), pixels_first(x), pixels_first(y), mean, var,
        weight.contiguous(), bias.contiguous(), eps, slope, added,
        None if passed is None else pixels_first(passed),
    )  # fmt: skip
    return to_x.movedim(-1, -3), to_add.movedim(-1, -3) if added else to_add, to_weight, to_bias


@fake("ssfl::batch_norm_grad")
def _(
    grad: Tensor, x: Tensor, y: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor,
    eps: float, slope: float, added: bool, passed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _like_grads(x, weight, bias, added)


def _remember_batch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, add, *_, ctx.eps, ctx.slope, _ = inputs
    ctx.set_materialize_grads(False)  # no zeros as gradients of the statistics
    ctx.added = add is not None
    ctx.save_for_backward(x, weight, bias, *output[:3])


def _batch_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, y, mean, var = ctx.saved_tensors
    to_x, to_add, scale, shift = _batch_grad(
        grad, x, y, mean, var, weight, bias, ctx.eps, ctx.slope, ctx.added, None
    )
    return to_x, scale, shift, to_add if ctx.added else None, *[None] * 6


torch.library.register_autograd("ssfl::batch_norm", _batch_backward, setup_context=_remember_batch)


class BatchNormAndPass(torch.autograd.Function):
    """`batch_norm` (without `add`) for images that are also used elsewhere, such as in a residual block. It
    returns the images as a sixth result, which must be used there (see `convolution.ConvolveAndPass`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
        momentum: float, eps: float, slope: float, sums: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.eps, ctx.slope = eps, slope
        ctx.set_materialize_grads(False)
        y, *statistics = batch_norm(
            x, weight, bias, None, running_mean, running_var, momentum, eps, slope, sums
        )
        ctx.save_for_backward(x, weight, bias, y, *statistics[:2])
        ctx.mark_non_differentiable(*statistics)
        return y, *statistics, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, passed = grads[0], grads[5]
        if grad is None:
            return passed, *[None] * 8
        x, weight, bias, y, mean, var = ctx.saved_tensors
        to_x, _, to_weight, to_bias = _batch_grad(
            grad, x, y, mean, var, weight, bias, ctx.eps, ctx.slope, False, passed
        )
        return to_x, to_weight, to_bias, *[None] * 6
