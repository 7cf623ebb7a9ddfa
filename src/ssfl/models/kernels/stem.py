"""The two convolutions of the network `cnn`, with ReLU, max pooling and dropout, as one PyTorch operator with
gradients. This reads and writes the images fewer times than separate operators would.

The GPU code is in `triton_conv.py` and `triton_pool.py`.
"""

from typing import Any

import torch
from torch import Tensor

from ssfl.models.kernels.convolution import FEW, pixels_first, suit
from ssfl.models.kernels.operators import fake, operator

KERNEL = 3
"""The side of the filters of both convolutions. They have stride 1 and no padding."""


def fits(x: Tensor, weight: Tensor, weight2: Tensor) -> bool:
    """Returns whether the operator can be used: n models at once, a Hopper GPU, bfloat16, few input channels,
    an even height and width before pooling, and not too many images. `weight` and `weight2` are the filters
    of the two convolutions."""
    if weight.dim() == 4 or not suit(x, weight) or weight.shape[2] > FEW or weight2.shape[1] % 64:
        return False
    from ssfl.models.kernels import triton_tma

    sides = {weight.shape[3], weight.shape[4], weight2.shape[3], weight2.shape[4]}
    even = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0 and min(x.shape[2:]) > 2 * KERNEL
    small = x.numel() // (len(weight) * x.shape[1]) * weight2.shape[1] < 2**31  # offsets have 32 bits
    return sides == {KERNEL} and even and small and triton_tma.usable(x.device)


@operator("ssfl::stem")
def stem(
    x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ReLU(keep · max_pool(convolution(ReLU(convolution(x))))) for n models, [n · B, O, H, W]. Images
    are [n · B, C, 2H + 4, 2W + 4], filters [n, M, C, 3, 3] and [n, O, M, 3, 3], biases [n, M] and [n, O].
    `keep` [n · B, O] has dropout's factor for each channel of each image; None means no dropout.

    Also returns what the gradient needs: the output of the first ReLU, and the positions of the largest
    pixels.
    """
    from ssfl.models.kernels import triton_conv, triton_pool

    hidden = triton_conv.first(x.contiguous(), weight.contiguous(), bias, 1, 0, relu=True)
    out, largest = triton_pool.pooled(hidden, pixels_first(weight2), bias2, keep)
    return out, hidden, largest


@fake("ssfl::stem")
def _(
    x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    count, height, width = x.shape[0], x.shape[2] - 2, x.shape[3] - 2
    hidden = x.new_empty(count, height, width, weight.shape[1])
    height, width = (height - 2) // 2, (width - 2) // 2
    largest = x.new_empty(count, height, width, weight2.shape[1], dtype=torch.uint8)
    return x.new_empty(count, weight2.shape[1], height, width), hidden, largest


@operator("ssfl::stem_grad", gradient=False)
def _grad(
    grad: Tensor, x: Tensor, weight2: Tensor, hidden: Tensor, largest: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ssfl.models.kernels import triton_conv, triton_pool

    models = len(weight2)
    before, sums = triton_pool.spread(grad.contiguous(), largest, keep)
    to_bias2 = sums.unflatten(0, (models, -1)).sum(1).to(grad.dtype)
    to_weight2 = triton_conv.weights_grad(before, hidden, False, models, KERNEL, 1, 0)
    size = list(hidden.shape[1:3])
    to_hidden = triton_conv.spread(before, pixels_first(weight2), size, 1, 0, output=hidden)
    to_weight, to_bias = triton_conv.first_grad(to_hidden, x.contiguous(), models, KERNEL)
    return to_weight, to_bias, to_weight2.movedim(-1, -3), to_bias2


@fake("ssfl::stem_grad")
def _(
    grad: Tensor, x: Tensor, weight2: Tensor, hidden: Tensor, largest: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    models, outputs, middle, _, _ = weight2.shape
    to_weight = grad.new_empty(models, middle, x.shape[1], KERNEL, KERNEL)
    to_weight2 = grad.new_empty(models, outputs, KERNEL, KERNEL, middle).movedim(-1, -3)
    return to_weight, grad.new_empty(models, middle), to_weight2, grad.new_empty(models, outputs)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, _, _, weight2, _, keep = inputs
    _, hidden, largest = output
    ctx.save_for_backward(x, weight2, hidden, largest, keep)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[0]:
        raise NotImplementedError("no gradient for pictures")
    x, weight2, hidden, largest, keep = ctx.saved_tensors
    return None, *_grad(grad, x, weight2, hidden, largest, keep), None


torch.library.register_autograd("ssfl::stem", _backward, setup_context=_remember)
