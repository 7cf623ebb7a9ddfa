"""A Triton kernel (GPU code) for one step of SGD with n models. It updates a weight tensor, its momentum and
its copy in lower precision in one pass over memory."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from ssfl.models.kernels.launching import launch

HELD = 2048
"""How many values a Triton program updates."""


@triton.jit(do_not_specialize=["models"])
def _update(
    weight, velocity, gradient, narrow, rates, step, taken, per_model, models, decay, momentum,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NARROW: tl.constexpr, TAKEN: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Updates a part of one model's values: `weight`, `velocity` and `narrow`, which have the shape [models,
    per_model]."""
    model = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * HELD + tl.arange(0, HELD)
    at = model * per_model + i
    _step_of_sgd(
        weight, velocity, gradient, narrow, rates, step, taken, at, at, model, i < per_model, models,
        decay, momentum, MOMENTUM, NESTEROV, NARROW, TAKEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "models"])
def _update_joined(
    weight, velocity, gradient, narrow, rates, step, taken, owner, place, count, models, decay, momentum,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NARROW: tl.constexpr, TAKEN: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Updates a part of the `count` values of joined tensors. `owner` says to which model a value belongs,
    and `place` where it is in `weight`, `velocity` and `narrow`."""
    i = tl.program_id(0) * HELD + tl.arange(0, HELD)
    inside = i < count
    model = tl.load(owner + i, mask=inside, other=0)
    _step_of_sgd(
        weight, velocity, gradient, narrow, rates, step, taken, tl.load(place + i, mask=inside, other=0), i,
        model, inside, models, decay, momentum, MOMENTUM, NESTEROV, NARROW, TAKEN,
    )  # fmt: skip


@triton.jit
def _step_of_sgd(
    weight, velocity, gradient, narrow, rates, step, taken, at, i, model, inside, models, decay, momentum,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, NARROW: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """Updates the values at the positions `at`, whose gradients are at `i`. They belong to `model`, which is
    one number or has one number for each value. Only those with `inside` are read and written."""
    now = tl.load(step)
    if TAKEN:  # a model that has taken all its steps does not change
        inside &= now < tl.load(taken + model)
    w = tl.load(weight + at, mask=inside, other=0.0)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32) + decay * w
    if MOMENTUM:
        v = momentum * tl.load(velocity + at, mask=inside, other=0.0) + g
        tl.store(velocity + at, v, mask=inside)
        g = g + momentum * v if NESTEROV else v
    w -= tl.load(rates + now * models + model) * g
    tl.store(weight + at, w, mask=inside)
    if NARROW:
        tl.store(narrow + at, w.to(narrow.dtype.element_ty), mask=inside)


def update(
    weight: Tensor, velocity: Tensor, gradient: Tensor, narrow: Tensor | None, rates: Tensor, step: Tensor,
    taken: Tensor | None, decay: float, momentum: float, nesterov: bool,
) -> None:  # fmt: skip
    """Takes one step of SGD with one weight tensor of n models, [n, ...], in place.

    All tensors of this shape must have the same memory format, with the models outermost. `rates` [T, n] are
    the learning rates of T steps, and `step` [1] is the number of this step. `narrow` is a copy of the
    weights in lower precision, or None. `taken` [n] is how many steps each model takes; None means all T.
    """
    models = len(weight)
    per_model = weight.numel() // models
    launch(
        _update, (triton.cdiv(per_model, HELD), models),
        weight, velocity, gradient, weight if narrow is None else narrow, rates, step,
        step if taken is None else taken, per_model, models, decay, momentum,
        momentum != 0, nesterov, narrow is not None, taken is not None, HELD, num_warps=4,
    )  # fmt: skip


def update_joined(
    weight: Tensor, velocity: Tensor, gradient: Tensor, narrow: Tensor | None, owner: Tensor, place: Tensor,
    rates: Tensor, step: Tensor, taken: Tensor | None, decay: float, momentum: float, nesterov: bool,
) -> None:  # fmt: skip
    """Takes one step of SGD with joined weight tensors (`Joined` in `engines/buffers.py`) in place.

    `weight`, `velocity` and `narrow` are the common memory. `gradient` [V] has the gradients of the V values
    one after another; `owner` [V] are their models, and `place` [V] their positions in the common memory. The
    other arguments are as in `update`.
    """
    count, models = len(gradient), rates.shape[1]
    launch(
        _update_joined, (triton.cdiv(count, HELD),),
        weight, velocity, gradient, weight if narrow is None else narrow, rates, step,
        step if taken is None else taken, owner, place, count, models, decay, momentum,
        momentum != 0, nesterov, narrow is not None, taken is not None, HELD, num_warps=4,
    )  # fmt: skip
