"""A Triton kernel (GPU code) that adds up partial sums and rounds the result, in one pass over memory."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssfl.models.kernels.launching import launch

TOGETHER = 16
"""How many partial sums a Triton program loads at a time."""
HELD = 256
"""For how many values a Triton program adds up the partial sums."""


@triton.jit(do_not_specialize=["parts"])
def _totals(sums, out, parts, count, TOGETHER: tl.constexpr, HELD: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * HELD + tl.arange(0, HELD)
    total = tl.zeros((TOGETHER, HELD), dtype=tl.float32)
    for start in range(0, parts, TOGETHER):
        p = start + tl.arange(0, TOGETHER)
        inside = (p < parts)[:, None] & (i < count)[None, :]
        total += tl.load(sums + p[:, None].to(tl.int64) * count + i[None, :], mask=inside, other=0.0)
    tl.store(out + i, tl.sum(total, 0).to(out.dtype.element_ty), mask=i < count)


def totals(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of float32 tensors [parts, ...] over the parts, [...], rounded to `dtype`. The parts
    are always added in the same order, so the result has the same bits every time."""
    out = sums.new_empty(sums.shape[1:], dtype=dtype)
    launch(
        _totals, (triton.cdiv(out.numel(), HELD),),
        sums, out, len(sums), out.numel(), TOGETHER, HELD, num_warps=4,
    )  # fmt: skip
    return out
