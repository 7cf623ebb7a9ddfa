"""Replaces the functions of torch for dropout, attention and normalisation while a network from outside the
package runs.

Dropout gets its masks from ssfl's random numbers (`core/draws.py`), so that runs can be repeated and all
engines use the same masks. Attention and normalisation are replaced by equivalent functions that torch.vmap
can run for n models at once.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ssfl.core import draws


class _Masks:
    """Makes the dropout masks of one forward pass. A mask depends only on the random key of this pass, and on
    how many masks were made before it. `key` is None if no dropout is allowed."""

    def __init__(self, key: Tensor | None) -> None:
        self.key, self.count = key, 0

    def mask(self, x: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
        """Returns a random mask of ones and zeros of this shape, for dropout. Each element is zero with
        probability `rate`, rounded to a multiple of 1/65536. Raises ValueError if there is no key, as in eval
        mode."""
        if self.key is None:
            raise ValueError("dropout is active in eval mode: pass training=self.training to F.dropout")
        drawn = draws.bits(draws.fold(self.key, self.count), -(-math.prod(shape) // 4))
        self.count += 1
        parts = (drawn[:, None] >> torch.arange(0, 64, 16, device=x.device)) & 0xFFFF
        mask = parts.flatten()[: math.prod(shape)] >= round(rate * 0x10000)
        return mask.reshape(shape).to(x.dtype)

    def dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._scaled(input, tuple(input.shape), p, inplace) if train and p else input

    def feature_dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._scaled(input, _channels(input), p, inplace) if train and p else input

    def alpha_dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._alpha(input, tuple(input.shape), p, inplace) if train and p else input

    def feature_alpha_dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._alpha(input, _channels(input), p, inplace) if train and p else input

    def _scaled(self, x: Tensor, shape: tuple[int, ...], p: float, inplace: bool) -> Tensor:
        mask = self.mask(x, shape, p) / (1 - p if p < 1 else 1)
        return x.mul_(mask) if inplace else x * mask

    def _alpha(self, x: Tensor, shape: tuple[int, ...], p: float, inplace: bool) -> Tensor:
        """Returns x after alpha dropout (Klambauer et al. 2017). It sets dropped values to the lower limit of
        SELU instead of zero, and rescales the result. `p` is the probability that a value is dropped. `shape`
        is the shape of the dropout mask, which may drop whole channels. With `inplace`, x itself is
        changed."""
        limit = 1.7580993408473766
        scale = 0.0 if p == 1 else 1 / math.sqrt((limit**2 * p + 1) * (1 - p))
        mask = self.mask(x, shape, p)
        shift = (mask - 1) * (limit * scale) + limit * scale * p
        return x.mul_(mask * scale).add_(shift) if inplace else x * (mask * scale) + shift

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Returns scaled dot-product attention, computed by plain matrix products. It replaces torch's own
        function, which torch.vmap cannot run for n models at once."""
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.mT
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p, True) @ value


def _channels(x: Tensor) -> tuple[int, ...]:
    """Returns the shape of a dropout mask that drops whole channels of x."""
    return (*x.shape[:2], *[1] * (x.dim() - 2))


@contextlib.contextmanager
def replaced_functions(key: Tensor | None) -> Iterator[None]:
    """Replaces functions of torch during a `with` block in which a network from outside the package runs.
    Dropout then uses ssfl's random numbers. Functions that torch.vmap cannot run are replaced by equivalent
    ones.

    `key` determines the dropout masks. If it is None, as in eval mode, a call of dropout raises ValueError.
    For dropout it is enough to replace functions of `torch._VF`, because all dropout functions of
    `torch.nn.functional` call these.
    """
    masks = _Masks(key)
    drops = [masks.dropout, masks.feature_dropout, masks.alpha_dropout, masks.feature_alpha_dropout]
    functions: list[tuple[Any, str, Callable[..., Tensor]]] = [
        (F, "scaled_dot_product_attention", masks.attention),
        (F, "batch_norm", _in_float32(F.batch_norm)),
        (F, "instance_norm", _in_float32(F.instance_norm)),
        *((torch._VF, function.__name__, function) for function in drops),
        *((torch._VF, f"{function.__name__}_", partial(function, inplace=True)) for function in drops),
    ]
    before = [(home, name, getattr(home, name)) for home, name, _ in functions]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for home, name, function in functions:
            setattr(home, name, function)
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)
        torch.backends.mha.set_fastpath_enabled(fast)


def _in_float32(normalise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function that computes the same as `normalise`, but that torch.vmap can run.

    The returned function computes in at least float32, because torch.vmap does not allow 16-bit inputs
    together with running statistics in float32. It does not use cuDNN: cuDNN asks for the memory format of
    its inputs, and torch.vmap does not support this question.
    """

    def wide(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            result = normalise(input.to(torch.promote_types(input.dtype, torch.float32)), *args, **kwargs)
        return result.to(input.dtype)

    return wide
