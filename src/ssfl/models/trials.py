"""Tries a person's module on artificial images, and refuses it if training with it would fail or could not be
repeated."""

import copy
import inspect
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssfl.core.generators import FindDraws, random_states
from ssfl.core.rows import statistics
from ssfl.errors import ConfigError
from ssfl.models.replaced import replaced_functions


def check_logits(module: nn.Module, setting: str, classes: int, shape: tuple[int, int, int]) -> None:
    """Raises ConfigError if a forward pass in evaluation mode fails, or does not return logits of the shape
    [images, classes]."""
    images = _example(shape)
    try:
        with torch.no_grad(), replaced_functions(None):
            logits = module(images)
    except Exception as error:
        raise refused(
            f"{setting}: calling the module with float images {list(images.shape)} raised {reason(error)}",
            error,
        ) from error
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = (
            f"a tensor of {logits.dtype}"
            if isinstance(logits, Tensor)
            else f"a value of type {type(logits).__name__}"
        )
        raise refused(f"{setting} returned {kind}: its forward must return only logits, a float tensor", kind)
    if tuple(logits.shape) != (len(images), classes):
        expected = f"[{len(images)}, {classes}]"
        fix = f"make its last layer {classes} wide" if logits.dim() == 2 else "return one row for each image"
        raise refused(
            f"{setting} returned logits {list(logits.shape)} for {len(images)} images and {classes} classes, "
            f"not {expected}: {fix}",
            tuple(logits.shape),
        )
    one = torch.ones(len(images), dtype=logits.dtype)
    if classes > 1 and bool((logits > 0).all()) and torch.allclose(logits.sum(1), one, atol=1e-3):
        raise refused(
            f"{setting} returned probabilities, because each row is positive and sums to 1: remove the "
            "softmax from the end of its forward, since the loss applies it to logits",
            "softmax",
        )


def check_training(network: nn.Module, module: nn.Module, setting: str, shape: tuple[int, int, int]) -> None:
    """Raises ConfigError if a training step fails, if it changes a buffer, or if the module draws its own
    random numbers. Changes of buffers would be lost, and a run with such random numbers could not be
    repeated. `network` is the person's `module`, or wraps it."""
    try:
        copied, inner = copy.deepcopy((network, module))  # still one inside the other
        copied.train()
        key = torch.tensor(7)
        changed = _changed_buffer(inner, _example(shape), key)
        states = random_states()
        first, again = (copied(_example(shape), key) for _ in range(2))
        first.sum().backward()
    except Exception as error:
        raise refused(f"{setting}: training the module raised {reason(error)}", error) from error
    if changed is not None:
        raise refused(
            f"{setting}: the buffer {changed} changes while the module trains, but only the running "
            "statistics of normalisation layers are kept and averaged: use a layer without such a buffer",
            changed,
        )
    used = [kind for kind, state in random_states().items() if state != states[kind]]
    if used or not torch.allclose(first, again, 1e-3, 1e-4, equal_nan=True):
        source = " and ".join(used) or "a generator of its own"
        if "torch" in used:
            with FindDraws() as watch, torch.no_grad():
                copied(_example(shape), key)
            source = f"torch ({watch.function})" if watch.function else source
        raise refused(
            f"{setting} draws random numbers from {source} while it trains, so a run cannot be "
            "repeated: use nn.Dropout, whose random numbers ssfl draws itself, or a layer without random "
            "numbers",
            source,
        )


def is_whole(module: nn.Module, shape: tuple[int, int, int]) -> bool:
    """Returns whether a network with a trunk and a tail computes tail(trunk(x)) and nothing else. `shape` is
    the shape of an image. The network is tried in evaluation mode, on two artificial images."""
    try:
        tried, images = copy.deepcopy(module).cpu().float().eval(), _example(shape)
        with torch.no_grad():
            whole = tried(images)
            parts = tried.get_submodule("tail")(tried.get_submodule("trunk")(images))
            close = torch.allclose(whole, parts, 1e-3, 1e-4, equal_nan=True)
    except Exception:  # the tail cannot use what the trunk returns
        return False
    return close and whole.shape == parts.shape


def _changed_buffer(module: nn.Module, images: Tensor, key: Tensor) -> str | None:
    """Returns the name of a buffer that a training step changes, or None if there is none. Running statistics
    of normalisation layers, and their count of batches, are left out."""
    buffers = dict(module.named_buffers())
    after = {name: buffer.clone() for name, buffer in buffers.items()}
    takes_key = "key" in inspect.signature(module.forward).parameters
    with torch.no_grad(), replaced_functions(key):
        functional_call(module, after, (images, key) if takes_key else (images,))
    kept = statistics(module)
    return next(
        (
            name
            for name, buffer in buffers.items()
            if name not in kept and name.rpartition(".")[2] != "num_batches_tracked"
            if not torch.equal(buffer, after[name])
        ),
        None,
    )


def refused(message: str, value: object) -> ConfigError:
    """Returns the ConfigError for a module that cannot be used. `value` is the cause, such as what the module
    returned or raised."""
    return ConfigError(message, key="model.name", value=value)


def _example(shape: tuple[int, int, int]) -> Tensor:
    """Returns two artificial images [2, C, H, W], with which a module is tested. They are the same every
    time."""
    return torch.linspace(-1, 1, 2 * math.prod(shape)).sin().reshape(2, *shape)


def reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")
