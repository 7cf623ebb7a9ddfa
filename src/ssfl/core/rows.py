"""A model is a row: its P weights, flattened, then the Q running statistics of its normalisation, if any.

Layer shapes appear only here and inside the networks. Everything else (averaging, momentum,
diversity, checkpoints, messages) works on rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """The order and shapes of a network's tensors in its row."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    weights: int
    """P, how many of the row's numbers are weights; the statistics follow."""

    @property
    def length(self) -> int:
        return sum(self.sizes)

    @property
    def trained(self) -> int:
        """How many of the tensors are weights."""
        return next(i for i in range(len(self.sizes) + 1) if sum(self.sizes[:i]) == self.weights)

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Returns the named tensors of one row, or of a matrix of rows (its first dimension stays first).

        A row without statistics gives only the weights.
        """
        count = len(self.sizes) if row.shape[-1] == self.length else self.trained
        parts = row.split(self.sizes[:count], dim=-1)
        lead = row.shape[:-1]
        return {
            name: part.reshape(*lead, *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=False)
        }

    def flatten(self, tensors: dict[str, Tensor], lead: int = 0) -> Tensor:
        """Returns the row of these tensors, all or only the weights; the first `lead` dimensions stay."""
        return torch.cat(
            [tensors[n].reshape(*tensors[n].shape[:lead], -1) for n in self.names if n in tensors],
            dim=-1,
        )


def lengths(parts: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each of n models, [n], over all its tensors [n, ...]."""
    return torch.stack([part.flatten(1).square().sum(1) for part in parts]).sum(0).sqrt()


def placed(values: Sequence[Any] | Tensor | int, device: torch.device) -> Tensor:
    """Copies numbers to a device without waiting for it."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained, by name; frozen ones are not part of the row."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def learning(model: nn.Module) -> dict[str, bool]:
    """Returns whether each module learns, by name: whether it has trained parameters or, if it has none at
    all, whether its parent learns. Modules that do not learn stay in evaluation mode."""
    learns: dict[str, bool] = {}
    for name, module in model.named_modules():  # a parent comes before its parts
        weights = list(module.parameters())
        parent = learns.get(name.rpartition(".")[0], True)
        learns[name] = any(weight.requires_grad for weight in weights) if weights else parent
    return learns


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Returns the running statistics of normalisation layers that learn, by name."""
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
    """Returns the layout of a network: trained parameters in their order, then running statistics in
    theirs."""
    parameters: dict[str, Tensor] = {**trained(model)}
    tensors = parameters | statistics(model)
    return Layout(
        tuple(tensors),
        tuple(tuple(t.shape) for t in tensors.values()),
        tuple(t.numel() for t in tensors.values()),
        sum(t.numel() for t in parameters.values()),
    )


def row_of(model: nn.Module, layout: Layout) -> Tensor:
    """Returns a copy of a network's current weights and statistics as a row."""
    state = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return layout.flatten(state).clone()


def write_row(model: nn.Module, layout: Layout, row: Tensor) -> None:
    """Sets a network's trained weights and statistics to those of a row."""
    values = layout.unflatten(row)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in values:
                tensor.copy_(values[name])
