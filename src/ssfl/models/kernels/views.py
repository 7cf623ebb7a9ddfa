"""Augmented views of images on a GPU, and the random numbers for them. Their GPU code is in `triton_views.py`
and `triton_draws.py`; `data/augment.py` and `engines/work.py` have plain PyTorch code for the same bytes."""

from importlib import metadata
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssfl.data import augment, operations
from ssfl.models.kernels import convolution

if TYPE_CHECKING:
    from ssfl.models.kernels.triton_views import Tables

TRITON = (3, 4)
"""The oldest version of Triton that can compile the kernels."""
MOST_PIXELS = 64 * 64
"""The largest images of which the kernels make views. A Triton program holds a whole image in registers."""


def _has_triton() -> bool:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= TRITON


HAS_TRITON = _has_triton()
"""Whether Triton is new enough. A constant, because compiled code cannot look up versions."""
_TABLES: dict[tuple[int, int, torch.device], "Tables"] = {}


def suit(images: Tensor, view: augment.View, dtype: torch.dtype) -> bool:
    """Returns whether the GPU kernels can make such views of the uint8 images [N, C, H, W], normalised in
    this number type, and are not switched off. Images must have one or three channels."""
    return (
        images.is_cuda
        and view in (augment.WEAK, augment.STRONG)
        and dtype in (torch.bfloat16, torch.float32)
        and images.shape[1] in (1, 3)
        and images.shape[2] * images.shape[3] <= MOST_PIXELS
        and images.is_contiguous()
        and convolution.usable()
        and HAS_TRITON
    )


def make(
    view: augment.View, images: Tensor, indices: Tensor, keys: Tensor, flip: bool, mean: Tensor, std: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns normalised views, [m, C, H, W], of the uint8 images with these indices [m]. Each view is made
    with the random numbers of its key in `keys` [m]."""
    from ssfl.models.kernels import triton_views

    if view == augment.STRONG:
        return triton_views.strong(images, indices, keys, flip, mean, std, dtype, tables(images))
    return triton_views.weak(images, indices, keys, flip, mean, std, dtype)


def tables(images: Tensor) -> "Tables":
    """Returns the lookup tables of the operations for images of this size. They are made at the first call,
    which must not be part of the recording of a CUDA graph."""
    from ssfl.models.kernels.triton_views import Tables

    height, width = images.shape[2:]
    key = height, width, images.device
    if key not in _TABLES:
        _TABLES[key] = Tables(
            *(table.to(images.device) for table in operations.operation_tables(height, width))
        )
    return _TABLES[key]


def step_keys(keys: Tensor, step: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Returns the keys of one step, [4, n], and those of its images, [3, n, batch]. They are made from the
    keys of a round, [4, n], for four purposes and n trainers; the first three are for views. `step` [1] is
    the number of the step."""
    from ssfl.models.kernels import triton_draws

    return triton_draws.step_keys(keys, step, batch)


def positions(
    base: int, trainers: Tensor, sizes: Tensor, first: int | Tensor, count: int, turns: int
) -> Tensor:
    """Returns the same as `positions` in `engines/work.py`, which explains the arguments. The shuffle makes
    `turns` passes."""
    from ssfl.models.kernels import triton_draws

    return triton_draws.positions(base, trainers, sizes, first, count, turns)
