"""Any `nn.Module` as a network: one model, or n models at once.

A factory `make() -> nn.Module` gives a module that maps float images [B, C, H, W] to logits [B, classes].
`External` wraps it so that engines can treat it like a network built from `ssfl.models.layers`: they call it
with parameters that may have one more dimension in front, [n, ...], and with the images of n models one after
another in the batch. Then it runs under `torch.func.vmap`. Frozen parameters exist once, for all of them.
"""

import contextlib
import copy
import hashlib
import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ssfl.core import draws, outside
from ssfl.core.rows import layout_of, learning, statistics, trained
from ssfl.errors import ConfigError, SsflWarning
from ssfl.models import layers

Factory = Callable[[], nn.Module]
Named = dict[str, Tensor]
_OWN = (layers.Conv2d, layers.Linear, layers.GroupNorm, layers.BatchNorm)


class External(nn.Module):
    """A module from outside, with the names that its own tensors have."""

    module: nn.Module
    compilable = False
    """Dropout is replaced while the module is called, which a compiler would not see."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # the same dicts: what `functional_call` exchanges here is exchanged in the module
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = module.__dict__[shared]
        self.__dict__["module"] = module  # not a part of this one: its names would begin with "module."
        self.batched = True
        """Whether n models run together under vmap, or one after another."""
        self._dims = {name: weight.dim() for name, weight in trained(module).items()}
        self._statistics = list(statistics(module))
        self._fixed = [name for name, _ in module.named_buffers() if name not in self._statistics]
        self._learns = learning(module)
        self._wide = set(_normalising(module))
        self._takes_key = "key" in inspect.signature(module.forward).parameters
        self._narrow: dict[torch.dtype, Named] = {}
        self.train(module.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> "External":
        """A copy that has the frozen tensors in common with this one."""
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if name not in self._dims and name not in self._statistics:
                memo[id(tensor)] = tensor
        memo |= {id(tensor): tensor for made in self._narrow.values() for tensor in made.values()}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def train(self, mode: bool = True) -> "External":
        """Training mode, but for what is frozen, which stays in evaluation mode."""
        self.training = mode
        for name, part in self.module.named_modules():
            part.training = mode and self._learns[name]
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "External":
        self._narrow.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Logits of images [B, ...], or of n models' images [n · B, ...]; keys name the dropout masks."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        state = {name: tensors[name] for name in (*self._dims, *self._statistics)}
        first = next(iter(self._dims))
        if state[first].dim() == self._dims[first]:
            logits, moved = self._one(state, x, keys)
        else:
            logits, moved = self._many(state, x, keys)
        for name, value in moved.items():  # replaced, never written into
            owner, _, attribute = name.rpartition(".")
            self.get_submodule(owner)._buffers[attribute] = value
        return logits

    def _many(self, state: Named, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Named]:
        """Of n models, together or one after another."""
        models = len(next(iter(state.values())))
        images = x.unflatten(0, (models, -1))
        if self.batched and models > 1:
            logits, moved = vmap(self._one, in_dims=(0, 0, None if keys is None else 0))(state, images, keys)
            return logits.flatten(0, 1), moved
        parts = [
            self._one({name: value[i] for name, value in state.items()}, images[i], _item(keys, i))
            for i in range(models)
        ]
        moved = {name: torch.stack([part[1][name] for part in parts]) for name in parts[0][1]}
        return torch.cat([part[0] for part in parts]), moved

    def _one(self, state: Named, x: Tensor, key: Tensor | None) -> tuple[Tensor, Named]:
        """One model's logits, and its new statistics in training mode."""
        state = {name: self._usable(name, value, x.dtype) for name, value in state.items()}
        state |= self._frozen(x.dtype)
        if self.training:
            buffers = dict(self.named_buffers())
            state |= {name: state[name].clone() for name in self._statistics}
            state |= {name: state.get(name, buffers[name]).clone() for name in self._fixed}
        with _replaced(_Masks(key)):
            logits = functional_call(self.module, state, (x, key) if self._takes_key else (x,))
        moved = {name: state[name].detach() for name in self._statistics} if self.training else {}
        return logits, moved

    def _usable(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor as the module computes with it: layers with statistics take weights in float32."""
        return value.to(torch.promote_types(dtype, torch.float32) if name in self._wide else dtype)

    def _frozen(self, dtype: torch.dtype) -> Named:
        """Copies of what is frozen in another type than its own, made once; nothing if it has that type."""
        if dtype not in self._narrow:
            tensors = dict(self.named_parameters()) | dict(self.named_buffers())
            self._narrow[dtype] = {
                name: made
                for name, tensor in tensors.items()
                if name not in self._dims and name not in self._statistics and tensor.is_floating_point()
                if (made := self._usable(name, tensor.detach(), dtype)).dtype != tensor.dtype
            }
        return self._narrow[dtype]


def build(make: Any, said: str, classes: int, shape: tuple[int, int, int], seed: int) -> nn.Module:
    """The network that a factory makes, checked; its initial weights are a function of the seed.

    `said` is how messages name the factory. Networks made of `ssfl.models.layers` alone need no wrapper.
    """
    if isinstance(make, nn.Module) or not callable(make):
        kind = "a module" if isinstance(make, nn.Module) else f"a {type(make).__name__}"
        raise _refused(f"{said} is {kind}: give a function without arguments that makes the nn.Module", make)
    with _seeded(seed):
        try:
            module = make()
        except Exception as error:
            raise _refused(f"{said}: making the module raised {_reason(error)}", error) from error
        module = getattr(module, "_orig_mod", module)  # of torch.compile
        if not isinstance(module, nn.Module):
            raise _refused(f"{said} made a {type(module).__name__}: it must return an nn.Module", module)
        _check_logits(module.eval(), said, classes, shape)
        if not trained(module):
            raise _refused(
                f"{said} has no parameter with requires_grad=True: leave at least its last layer unfrozen", 0
            )
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.momentum is None:
                raise _refused(
                    f"{said}: {name} has momentum=None, and a count of batches cannot be averaged: give it "
                    "a momentum, such as 0.1",
                    name,
                )
        network = module if _is_own(module) else External(module)
        _check_training(network, said, shape)
    return network.train()


def named(name: str, make: Factory | None, classes: int, shape: tuple[int, int, int], seed: int) -> nn.Module:
    """The network of an import path that a person typed, or of a factory that is in memory."""
    if make is None and name == outside.IN_MEMORY:
        raise ConfigError(
            "model.name = 'in memory': this network was passed as a Python object, so pass it again: "
            "ssfl.resume(RUN, model=make) or ssfl.load_model(RUN, model=make)"
        )
    found = outside.load(name, "model.name") if make is None else make
    return build(found, f"model.name = {name!r}", classes, shape, seed)


def plain(network: nn.Module) -> nn.Module:
    """The module itself, as its factory made it."""
    return network.module if isinstance(network, External) else network


def fingerprint(network: nn.Module) -> str:
    """A checksum of everything that a row does not hold: frozen weights, other buffers, and the layout."""
    layout = layout_of(network)
    digest = hashlib.sha256(repr((layout.names, layout.shapes)).encode())
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    for name, tensor in sorted(tensors.items()):
        if name not in layout.names:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_precision(network: nn.Module, images: Tensor) -> None:
    """Raise if a module cannot compute in the type of these images."""
    if not isinstance(network, External):
        return
    narrow = {name: weight.detach().to(images.dtype) for name, weight in trained(network).items()}
    try:
        with torch.no_grad():
            functional_call(network.eval(), narrow, (images,))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        kind = str(images.dtype).removeprefix("torch.")
        raise ConfigError(
            f"train.precision = {kind!r}: the module of model.name raised {_reason(error)}: use 'float32'",
            key="train.precision",
            value=kind,
            fix="train.precision=float32",
        ) from error


def try_batching(network: nn.Module, images: Tensor) -> None:
    """Find out whether torch can run n such models at once; if not, say so, and run one after another.

    `images` are two normalised images, of the type and on the device of the training.
    """
    if not isinstance(network, External):
        return
    layout = layout_of(network)
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    state = {name: torch.stack([tensors[name].detach()] * 2) for name in layout.names}
    state = {n: v.to(images.dtype) if n in trained(network) else v for n, v in state.items()}
    keys = torch.arange(2, device=images.device)
    before = network.training
    functorch: Any = torch._C._functorch
    fallback = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)  # a slow loop inside one operator
    try:
        with torch.no_grad():
            for mode in (True, False):
                functional_call(network.train(mode), dict(state), (torch.cat([images, images]), keys))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        network.batched = False
        warnings.warn(
            f"torch cannot run several of these modules at once ({_reason(error)}): users are trained one "
            "after another",
            SsflWarning,
            stacklevel=2,
        )
    finally:
        functorch._set_vmap_fallback_enabled(fallback)
        network.train(before)


def _is_own(module: nn.Module) -> bool:
    """Whether a network is made of `ssfl.models.layers` and can run many models without a wrapper."""
    learns = learning(module)
    holders = [(n, part) for n, part in module.named_modules() if list(part.parameters(recurse=False))]
    return "key" in inspect.signature(module.forward).parameters and all(
        isinstance(part, _OWN) and (learns[name] or not isinstance(part, layers.BatchNorm))
        for name, part in holders
    )


def _normalising(module: nn.Module) -> Iterator[str]:
    """The names of the tensors of layers with running statistics."""
    for name, part in module.named_modules():
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if any(own == "running_var" for own, _ in tensors):
            yield from (f"{name}.{own}" if name else own for own, _ in tensors)


def _check_logits(module: nn.Module, said: str, classes: int, shape: tuple[int, int, int]) -> None:
    """One pass in evaluation mode: what comes out must be logits."""
    images = _example(shape)
    try:
        with torch.no_grad(), _replaced(_Masks(None)):
            logits = module(images)
    except Exception as error:
        raise _refused(
            f"{said}: calling the module with float images {list(images.shape)} raised {_reason(error)}",
            error,
        ) from error
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = f"a tensor of {logits.dtype}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise _refused(f"{said} gave {kind}: its forward must return logits alone, a float tensor", kind)
    if tuple(logits.shape) != (len(images), classes):
        right = f"[{len(images)}, {classes}]"
        fix = f"make its last layer {classes} wide" if logits.dim() == 2 else "return one row for each image"
        raise _refused(
            f"{said} gave logits {list(logits.shape)} of {len(images)} images and {classes} classes, not "
            f"{right}: {fix}",
            tuple(logits.shape),
        )


def _check_training(network: nn.Module, said: str, shape: tuple[int, int, int]) -> None:
    """Two passes and a gradient in training mode: all randomness must come from the keys."""
    try:
        copied = copy.deepcopy(network).train()
        key, states = torch.tensor(7), _random_states()
        first, again = (copied(_example(shape), key) for _ in range(2))
        first.sum().backward()
    except Exception as error:
        raise _refused(f"{said}: training the module raised {_reason(error)}", error) from error
    used = [kind for kind, state in _random_states().items() if state != states[kind]]
    if used or not torch.allclose(first, again, 1e-3, 1e-4, equal_nan=True):
        what = " and ".join(used) or "a generator of its own"
        if "torch" in used:
            with _Watch() as watch, torch.no_grad():
                copied(_example(shape), key)
            what = f"torch ({watch.found})" if watch.found else what
        raise _refused(
            f"{said} draws random numbers from {what} while it trains, which cannot be repeated: use "
            "nn.Dropout or a layer without chance",
            what,
        )


def _refused(message: str, value: object) -> ConfigError:
    """A network that cannot be used; `value` is what it gave, raised or drew from."""
    return ConfigError(message, key="model.name", value=value)


def _example(shape: tuple[int, int, int]) -> Tensor:
    """Two images of nothing in particular."""
    return torch.linspace(-1, 1, 2 * math.prod(shape)).sin().reshape(2, *shape)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global generators start from the seed and are afterwards as if nothing had happened."""
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002


def _random_states() -> dict[str, Any]:
    array = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy.random": (array["key"].tobytes(), array["pos"]),
    }


class _Watch(TorchFunctionMode):
    """Which function draws random numbers."""

    found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not self.found and not torch.equal(before, torch.get_rng_state()):
            self.found = getattr(func, "__name__", str(func))
        return result


class _Masks:
    """What a call's dropout keeps: a function of the key and of how many masks came before."""

    def __init__(self, key: Tensor | None) -> None:
        self.key, self.count = key, 0

    def kept(self, x: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
        """Ones and zeros of a shape; each takes 16 bits of a draw."""
        if self.key is None:
            raise ValueError("it drops numbers without a key: pass training=self.training to F.dropout")
        drawn = draws.bits(draws.fold(self.key, self.count), -(-math.prod(shape) // 4))
        self.count += 1
        parts = (drawn[:, None] >> torch.arange(0, 64, 16, device=x.device)) & 0xFFFF
        kept = parts.flatten()[: math.prod(shape)] >= round(rate * 0x10000)
        return kept.reshape(shape).to(x.dtype)

    def dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._scaled(input, tuple(input.shape), p, inplace) if train and p else input

    def feature_dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._scaled(input, _channels(input), p, inplace) if train and p else input

    def alpha_dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._alpha(input, tuple(input.shape), p, inplace) if train and p else input

    def feature_alpha_dropout(self, input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        return self._alpha(input, _channels(input), p, inplace) if train and p else input

    def _scaled(self, x: Tensor, shape: tuple[int, ...], p: float, inplace: bool) -> Tensor:
        mask = self.kept(x, shape, p) / (1 - p if p < 1 else 1)
        return x.mul_(mask) if inplace else x * mask

    def _alpha(self, x: Tensor, shape: tuple[int, ...], p: float, inplace: bool) -> Tensor:
        """Dropout to SELU's lower limit that keeps mean and variance (Klambauer et al. 2017)."""
        limit = 1.7580993408473766
        scale = 0.0 if p == 1 else 1 / math.sqrt((limit**2 * p + 1) * (1 - p))
        kept = self.kept(x, shape, p)
        shift = (kept - 1) * (limit * scale) + limit * scale * p
        return x.mul_(kept * scale).add_(shift) if inplace else x * (kept * scale) + shift

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
        """Scaled dot-product attention in plain products, which torch can run for many models at once."""
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
    """The shape of a mask over channels."""
    return (*x.shape[:2], *[1] * (x.dim() - 2))


@contextlib.contextmanager
def _replaced(masks: _Masks) -> Iterator[None]:
    """While a module is called: dropout by named draws, and what torch cannot batch in another way.

    `torch._VF` is where all functions of `torch.nn.functional` that drop, however they were imported, end.
    """
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
    """The same for narrower numbers: torch's batching does not take them with statistics in float32.

    Without cuDNN, whose layers ask for the memory format, which torch's batching cannot tell.
    """

    def wide(input: Tensor, *more: Any, **named: Any) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            result = normalise(input.to(torch.promote_types(input.dtype, torch.float32)), *more, **named)
        return result.to(input.dtype)

    return wide


def _item(keys: Tensor | None, place: int) -> Tensor | None:
    return None if keys is None else keys[place]


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")
