"""Makes any `nn.Module` of a person usable as the network, for one model or for n models at once.

The person gives a factory `make() -> nn.Module`, whose module maps float images [B, C, H, W] to logits [B,
classes]. `External` wraps the module, so that engines can use it like a network made of `ssfl.models.layers`.
To train n models at once, an engine passes parameters with one more dimension, [n, ...]. The images of the n
models come one after another in the batch. The module then runs under `torch.func.vmap`. Frozen parameters
exist only once for all n models.
"""

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ssfl.core import outside
from ssfl.core.generators import seeded
from ssfl.core.rows import layout_of, learning, statistics, trained
from ssfl.errors import ConfigError, warn_user
from ssfl.models import layers
from ssfl.models.replaced import replaced_functions
from ssfl.models.trials import check_logits, check_training, reason, refused

Factory = Callable[[], nn.Module]
Named = dict[str, Tensor]
_OWN = (layers.Conv2d, layers.Linear, layers.GroupNorm, layers.BatchNorm)


class External(nn.Module):
    """Wraps a person's module, so that it can run as one model or as n models at once. Its tensors keep their
    names."""

    module: nn.Module
    compilable = False
    """Whether torch.compile may be used on the network. It may not: dropout functions are replaced during
    each call, which a compiler would not notice."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # both share these dicts, so what `functional_call` replaces here is replaced in the module too
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = module.__dict__[shared]
        self.__dict__["module"] = module  # not a submodule: its names would begin with "module."
        self.batched = True
        """Whether n models run together under vmap. If not, they run one after another."""
        self._dims = {name: weight.dim() for name, weight in trained(module).items()}
        self._statistics = list(statistics(module))
        self._fixed = [name for name, _ in module.named_buffers() if name not in self._statistics]
        self._learns = learning(module)
        self._wide = set(_normalising(module))
        self._takes_key = "key" in inspect.signature(module.forward).parameters
        self._narrow: dict[torch.dtype, Named] = {}
        self.train(module.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> "External":
        """Returns a copy of the network that shares the frozen tensors with the original, to save memory."""
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if name not in self._dims and name not in self._statistics:
                memo[id(tensor)] = tensor
        memo |= {id(tensor): tensor for copies in self._narrow.values() for tensor in copies.values()}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def train(self, mode: bool = True) -> "External":
        """Sets training or evaluation mode for the trained layers. Frozen layers always stay in evaluation
        mode."""
        self.training = mode
        for name, part in self.module.named_modules():
            part.training = mode and self._learns[name]
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "External":
        self._narrow.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Returns the logits of images [B, ...], or of the images of n models [n · B, ...]. `keys`, one for
        each model, determine the dropout masks."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        state = {name: tensors[name] for name in (*self._dims, *self._statistics)}
        first = next(iter(self._dims))
        if state[first].dim() == self._dims[first]:
            logits, statistics = self._one(state, x, keys)
        else:
            logits, statistics = self._many(state, x, keys)
        for name, value in statistics.items():  # replaces the buffer instead of writing into it
            owner, _, attribute = name.rpartition(".")
            self.get_submodule(owner)._buffers[attribute] = value
        return logits

    def _many(self, state: Named, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Named]:
        """Returns the logits [n · B, classes] and the new running statistics of n models. `state` has the
        tensors of all models by name, [n, ...] each. The models run together under vmap if possible,
        otherwise one after another."""
        models = len(next(iter(state.values())))
        images = x.unflatten(0, (models, -1))
        if self.batched and models > 1:
            run = vmap(self._one, in_dims=(0, 0, None if keys is None else 0))
            logits, statistics = run(state, images, keys)
            return logits.flatten(0, 1), statistics
        parts = [
            self._one({name: value[i] for name, value in state.items()}, images[i], _item(keys, i))
            for i in range(models)
        ]
        statistics = {name: torch.stack([part[1][name] for part in parts]) for name in parts[0][1]}
        return torch.cat([part[0] for part in parts]), statistics

    def _one(self, state: Named, x: Tensor, key: Tensor | None) -> tuple[Tensor, Named]:
        """Returns the logits [B, classes] of one model and its new running statistics by name. In evaluation
        mode there are no new ones, and the second result is empty. `state` has the model's tensors by name,
        and `key` determines the dropout masks."""
        state = {name: self._usable(name, value, x.dtype) for name, value in state.items()}
        state |= self._frozen(x.dtype)
        if self.training:
            buffers = dict(self.named_buffers())
            state |= {name: state[name].clone() for name in self._statistics}
            state |= {name: state.get(name, buffers[name]).clone() for name in self._fixed}
        with replaced_functions(key):
            logits = functional_call(self.module, state, (x, key) if self._takes_key else (x,))
        statistics = {name: state[name].detach() for name in self._statistics} if self.training else {}
        return logits, statistics

    def _usable(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor `name` in the number type in which its layer computes. This is `dtype`, but at
        least float32 for layers with running statistics."""
        return value.to(torch.promote_types(dtype, torch.float32) if name in self._wide else dtype)

    def _frozen(self, dtype: torch.dtype) -> Named:
        """Returns converted copies of the frozen tensors by name, in the number types in which their layers
        compute for inputs of type `dtype`. Tensors that need no conversion are left out. The copies are made
        once and remembered."""
        if dtype not in self._narrow:
            tensors = dict(self.named_parameters()) | dict(self.named_buffers())
            self._narrow[dtype] = {
                name: converted
                for name, tensor in tensors.items()
                if name not in self._dims and name not in self._statistics and tensor.is_floating_point()
                if (converted := self._usable(name, tensor.detach(), dtype)).dtype != tensor.dtype
            }
        return self._narrow[dtype]


def build(make: Any, setting: str, classes: int, shape: tuple[int, int, int], seed: int) -> nn.Module:
    """Returns the network that a person's factory `make` makes, after checking that it can be trained. Its
    initial weights depend only on the seed. Raises ConfigError if the factory or its network cannot be used.

    `setting` is the factory's name in error messages. A network made only of `ssfl.models.layers` is returned
    as it is; any other is wrapped in `External`.
    """
    if isinstance(make, nn.Module) or not callable(make):
        kind = "a module" if isinstance(make, nn.Module) else f"of type {type(make).__name__}"
        raise refused(
            f"{setting} is {kind}: give a function without arguments that makes the nn.Module", make
        )
    with seeded(seed):
        try:
            module = make()
        except Exception as error:
            raise refused(
                f"{setting}: the function that makes the module raised {reason(error)}", error
            ) from error
        module = getattr(module, "_orig_mod", module)  # torch.compile wraps the module
        if not isinstance(module, nn.Module):
            raise refused(
                f"{setting} returned a value of type {type(module).__name__}: return an nn.Module", module
            )
        check_logits(module.eval(), setting, classes, shape)
        if not trained(module):
            raise refused(
                f"{setting} has no parameter with requires_grad=True: do not freeze its last layer",
                0,
            )
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.momentum is None:
                raise refused(
                    f"{setting}: {name} has momentum=None, whose batch count cannot be averaged: give it "
                    "a momentum, such as 0.1",
                    name,
                )
        _require_one_name(module, setting)
        network = module if _is_own(module) else External(module)
        check_training(network, module, setting, shape)
    return network.train()


def _require_one_name(module: nn.Module, setting: str) -> None:
    """Raises ConfigError if a part with weights has two names in the module, because torch cannot replace the
    weights of such a part in a call."""
    names: dict[int, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        first = names.setdefault(id(part), name)
        if first != name and list(part.parameters()):
            raise refused(
                f"{setting}: {first} and {name} are the same part of the module: keep it under one name, for "
                "example by putting the second reference into a plain list instead of an nn.ModuleList",
                name,
            )


def named(name: str, make: Factory | None, classes: int, shape: tuple[int, int, int], seed: int) -> nn.Module:
    """Returns the network that a person's factory makes (see `build`). The factory is `make`, if one was
    passed from Python. If `make` is None, it is the function at the import path `name`."""
    if make is None and name == outside.IN_MEMORY:
        raise ConfigError(
            "model.name = 'in memory': this network was passed as a Python object, so pass it again: "
            "ssfl.resume(RUN, model=make) or ssfl.load_model(RUN, model=make)",
            key="model.name",
            value=name,
        )
    factory = outside.load(name, "model.name") if make is None else make
    setting = f"model.name = {name!r}" if make is None else "model"  # the name of the argument in Python
    return build(factory, setting, classes, shape, seed)


def plain(network: nn.Module) -> nn.Module:
    """Returns the module that the person's factory made, without the wrapper `External`."""
    return network.module if isinstance(network, External) else network


def fingerprint(network: nn.Module) -> str:
    """Returns a checksum of everything that must be the same in the networks of server and users, but is not
    sent between them. These are the frozen weights, the buffers that are not sent, and the names and shapes
    of all tensors."""
    layout = layout_of(network)
    digest = hashlib.sha256(repr((layout.names, layout.shapes)).encode())
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    for name, tensor in sorted(tensors.items()):
        if name not in layout.names:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_precision(network: nn.Module, images: Tensor) -> None:
    """Raises ConfigError if a person's module cannot compute with these images in their number type, such as
    bfloat16. The setting train.precision chooses this type."""
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
            f"train.precision = {kind!r}: the module of model.name raised {reason(error)}: "
            "set train.precision=float32",
            key="train.precision",
            value=kind,
            fix="train.precision=float32",
        ) from error


def try_batching(network: nn.Module, images: Tensor) -> None:
    """Tests whether torch.vmap can run several of these models at once. If not, it warns, and the models will
    run one after another.

    `images` are two normalised images, with the number type and on the device of the training.
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
    functorch._set_vmap_fallback_enabled(False)  # the fallback would be a slow loop over models
    try:
        with torch.no_grad():
            for mode in (True, False):
                functional_call(network.train(mode), dict(state), (torch.cat([images, images]), keys))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        network.batched = False
        warn_user(
            "users are trained one after another, which is slower, because torch.vmap cannot run several "
            f"copies of this network at once ({reason(error)})"
        )
    finally:
        functorch._set_vmap_fallback_enabled(fallback)
        network.train(before)


def _is_own(module: nn.Module) -> bool:
    """Returns whether a network is made only of `ssfl.models.layers`. Such a network can run n models at once
    without the wrapper `External`."""
    learns = learning(module)
    holders = [(n, part) for n, part in module.named_modules() if list(part.parameters(recurse=False))]
    return "key" in inspect.signature(module.forward).parameters and all(
        isinstance(part, _OWN) and (learns[name] or not isinstance(part, layers.BatchNorm))
        for name, part in holders
    )


def _normalising(module: nn.Module) -> Iterator[str]:
    """Yields the names of all tensors in layers with running statistics. These layers compute in at least
    float32."""
    for name, part in module.named_modules():
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if any(tensor_name == "running_var" for tensor_name, _ in tensors):
            yield from (f"{name}.{tensor_name}" if name else tensor_name for tensor_name, _ in tensors)


def _item(keys: Tensor | None, place: int) -> Tensor | None:
    return None if keys is None else keys[place]
