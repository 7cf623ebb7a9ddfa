"""A model as a row: one vector of its P trained weights, followed by its Q running statistics (BatchNorm), if
any.

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
    """The names, shapes and order of a network's tensors in its row."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    weights: int
    """P: how many numbers of the row are weights. The running statistics follow them."""

    @property
    def length(self) -> int:
        return sum(self.sizes)

    @property
    def trained(self) -> int:
        """How many of the tensors are trained weights. They are the first in `names`."""
        return next(i for i in range(len(self.sizes) + 1) if sum(self.sizes[:i]) == self.weights)

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Returns the tensors by name, given one row [P + Q], or several rows [n, P + Q], which give tensors
        [n, ...].

        A row without running statistics, [P], gives only the weights.
        """
        count = len(self.sizes) if row.shape[-1] == self.length else self.trained
        parts = row.split(self.sizes[:count], dim=-1)
        lead = row.shape[:-1]
        return {
            name: part.reshape(*lead, *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=False)
        }

    def flatten(self, tensors: dict[str, Tensor], lead: int = 0) -> Tensor:
        """Returns the row of these tensors, which are all of them or only the weights. The first `lead`
        dimensions are kept: with lead=1, tensors [n, ...] give n rows."""
        return torch.cat(
            [tensors[n].reshape(*tensors[n].shape[:lead], -1) for n in self.names if n in tensors],
            dim=-1,
        )


def lengths(parts: Sequence[Tensor]) -> Tensor:
    """Returns the Euclidean norm of each of n models, [n]. `parts` are the models' tensors, [n, ...] each."""
    return torch.stack([part.flatten(1).square().sum(1) for part in parts]).sum(0).sqrt()


def placed(values: Sequence[Any] | Tensor | int, device: torch.device) -> Tensor:
    """Returns numbers as a tensor on a device. The copy does not block the CPU."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name. Frozen parameters are left out, since they are not part of a
    row (a model as one vector)."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def learning(model: nn.Module) -> dict[str, bool]:
    """Returns for each module name whether the module learns. It does if it has trained parameters, or if it
    has no parameters and its parent learns. The other modules stay in evaluation mode."""
    learns: dict[str, bool] = {}
    for name, module in model.named_modules():  # a parent comes before its parts
        weights = list(module.parameters())
        parent = learns.get(name.rpartition(".")[0], True)
        learns[name] = any(weight.requires_grad for weight in weights) if weights else parent
    return learns


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Returns the running means and variances of normalisation layers by name. Those of frozen layers are
    left out."""
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
    """Returns the layout of a network's row: first its trained parameters, then its running statistics, each
    in the network's order."""
    parameters: dict[str, Tensor] = {**trained(model)}
    tensors = parameters | statistics(model)
    return Layout(
        tuple(tensors),
        tuple(tuple(t.shape) for t in tensors.values()),
        tuple(t.numel() for t in tensors.values()),
        sum(t.numel() for t in parameters.values()),
    )


def row_of(model: nn.Module, layout: Layout) -> Tensor:
    """Returns a network's current trained weights and running statistics as a row (one vector), copied."""
    state = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return layout.flatten(state).clone()


def write_row(model: nn.Module, layout: Layout, row: Tensor) -> None:
    """Copies a row (a model as one vector) into a network: its trained weights and running statistics."""
    values = layout.unflatten(row)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in values:
                tensor.copy_(values[name])
