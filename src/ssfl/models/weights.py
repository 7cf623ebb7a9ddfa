"""Loads initial weights from a file, for the setting `model.weights=FILE.safetensors`."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ssfl.core import plain_files
from ssfl.errors import ConfigError, one_line

LISTED = 4
"""An error message lists at most this many names of tensors."""


def load(network: nn.Module, file: str) -> None:
    """Loads the weights in a .safetensors file into a network. The file may lack the weights of the last
    layer, because they may have been trained for other classes. The network then keeps its own last layer.
    Raises ConfigError if the file does not fit the network."""
    tensors, state = _read(file), network.state_dict()
    last = _last_layer(network)
    unknown = sorted(tensors.keys() - state.keys())
    missing = sorted(
        name
        for name in state.keys() - tensors.keys()
        if name not in last and not name.endswith("num_batches_tracked")
    )
    if unknown or missing:
        problems = [("the file has no tensor", missing), ("the network has no tensor", unknown)]
        message = "; ".join(f"{problem} {_listed(names)}" for problem, names in problems if names)
        raise _error(file, f"{message}. Use a file for this model.name and model.norm.")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            shape, needed = tuple(tensor.shape), tuple(state[name].shape)
            advice = "remove this tensor from the file" if name in last else "use weights of the same network"
            raise _error(file, f"{name} has shape {shape}, but the network needs {needed}: {advice}")
        if not tensor.isfinite().all():
            raise _error(file, f"{name} contains numbers that are not finite: use another file")
    network.load_state_dict(tensors, strict=False)


def _read(file: str) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors file by name. Raises ConfigError if the file cannot be read."""
    try:
        plain_files.require_plain(Path(file))
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise _error(file, "there is no such file, check the path") from None
    except (SafetensorError, OSError) as error:
        raise _error(
            file, f"it is not a readable .safetensors file ({one_line(error, 200)}): use another file"
        ) from error


def _last_layer(network: nn.Module) -> set[str]:
    """Returns the names of the tensors of the network's last layer, which a file may lack."""
    layers = [name for name, part in network.named_modules() if list(part.parameters(recurse=False))]
    return {name for name in network.state_dict() if name.rpartition(".")[0] == layers[-1]}


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + rest


def _error(file: str, reason: str) -> ConfigError:
    return ConfigError(f"model.weights = {file!r}: {reason}", key="model.weights", value=file)
