"""Stores a model as a row: one vector of its P trained weights, followed by its Q running statistics (of
BatchNorm layers), if there are any.

Only this file and the networks know the shapes of layers. All other code (averaging, momentum, diversity,
checkpoints, messages) works on rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Describes how a network's tensors are arranged in its row (the model as one vector): their names,
    shapes and sizes, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    weights: int
    """P: how many numbers of the row are trained weights. The running statistics of normalisation layers
    follow them."""

    @property
    def length(self) -> int:
        return sum(self.sizes)

    @property
    def trained(self) -> int:
        """How many of the tensors are trained weights. They are the first in `names`; running statistics
        follow."""
        return next(i for i in range(len(self.sizes) + 1) if sum(self.sizes[:i]) == self.weights)

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Returns a model's tensors by name, given its row (the model as one vector of P weights and Q
        running statistics). For n rows [n, P + Q], the tensors are [n, ...].

        A row of only P weights gives only the trained weights.
        """
        count = len(self.sizes) if row.shape[-1] == self.length else self.trained
        parts = row.split(self.sizes[:count], dim=-1)
        lead = row.shape[:-1]
        return {
            name: part.reshape((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=False)
        }

    def flatten(self, tensors: dict[str, Tensor], lead: int = 0) -> Tensor:
        """Returns the row (one vector) of a model, given its tensors by name. If the running statistics are
        missing, the row has only the weights. The first `lead` dimensions are kept: with lead=1, tensors [n,
        ...] give n rows."""
        return torch.cat(
            [tensors[n].reshape(*tensors[n].shape[:lead], -1) for n in self.names if n in tensors],
            dim=-1,
        )


def lengths(parts: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm of each of n models, or of n gradients, [n]. `parts` are their tensors, [n,
    ...] each."""
    return torch.stack([part.flatten(1).square().sum(1) for part in parts]).sum(0).sqrt()


def placed(values: Sequence[Any] | Tensor | int, device: torch.device) -> Tensor:
    """Returns numbers as a tensor on a device. If the device is a GPU, the CPU does not wait for the copy."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters of a network by name. Frozen parameters are left out: they are not
    averaged or sent, so a model's row does not contain them."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def learning(model: nn.Module) -> dict[str, bool]:
    """Returns for each module in a network, by name, whether it is trained. Modules that are not trained stay
    in evaluation mode.

    A module is trained if it, or a module inside it, has trained parameters. If all its parameters are
    frozen, it is not trained. A module without any parameters, such as dropout, is trained if the module that
    contains it is trained.
    """
    learns: dict[str, bool] = {}
    for name, module in model.named_modules():  # a parent comes before its children
        weights = list(module.parameters())
        parent = learns.get(name.rpartition(".")[0], True)
        learns[name] = any(weight.requires_grad for weight in weights) if weights else parent
    return learns


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Returns the running means and variances of a network's normalisation layers by name. Those of frozen
    layers are left out, because they do not change."""
    learns = learning(model)
    running = {}
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        values = [buffers.get("running_mean"), buffers.get("running_var")]
        if learns[name] and all(value is not None for value in values):
            prefix = f"{name}." if name else ""
            running.update({f"{prefix}{key}": buffers[key] for key in ("running_mean", "running_var")})
    return running


def layout_of(model: nn.Module) -> Layout:
    """Returns how a network is arranged as a row (one vector): first its trained parameters, then its running
    statistics, each in the network's order."""
    parameters: dict[str, Tensor] = {**trained(model)}
    tensors = parameters | statistics(model)
    return Layout(
        tuple(tensors),
        tuple(tuple(t.shape) for t in tensors.values()),
        tuple(t.numel() for t in tensors.values()),
        sum(t.numel() for t in parameters.values()),
    )


def row_of(model: nn.Module, layout: Layout) -> Tensor:
    """Returns a copy of a network's current trained weights and running statistics as a row (one vector)."""
    state = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return layout.flatten(state).clone()


def write_row(model: nn.Module, layout: Layout, row: Tensor) -> None:
    """Copies a row (a model as one vector) into a network, where it replaces the trained weights and running
    statistics."""
    values = layout.unflatten(row)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in values:
                tensor.copy_(values[name])
