"""Weights from a file: `model.weights=FILE.safetensors`."""

from collections.abc import Sequence

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ssfl.errors import ConfigError

LISTED = 4
"""How many tensors an error names."""


def load(network: nn.Module, file: str) -> None:
    """Start a network from the weights in a file. The last layer may be missing: classes may be others."""
    tensors, own = _read(file), network.state_dict()
    own = {name: tensor for name, tensor in own.items() if not name.endswith("num_batches_tracked")}
    last = _last_layer(network)
    strange = sorted(tensors.keys() - network.state_dict().keys())
    missing = sorted(name for name in own.keys() - tensors.keys() if name not in last)
    if strange or missing:
        found = [("has no", missing), ("has tensors that the network has not:", strange)]
        what = "; ".join(f"{verb} {_listed(names)}" for verb, names in found if names)
        raise _error(file, f"{what}: is it for another model.name or model.norm?")
    for name, tensor in tensors.items():
        if tensor.shape != network.state_dict()[name].shape:
            here, there = tuple(network.state_dict()[name].shape), tuple(tensor.shape)
            leave = "leave it out of the file" if name in last else "use weights of the same network"
            raise _error(file, f"{name} is {there} and the network has {here}: {leave}")
        if not tensor.isfinite().all():
            raise _error(file, f"{name} holds numbers that are not finite: use another file")
    network.load_state_dict(tensors, strict=False)


def _read(file: str) -> dict[str, Tensor]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise _error(file, "there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise _error(file, f"it is not a readable .safetensors file ({str(error)[:200]})") from error


def _last_layer(network: nn.Module) -> set[str]:
    """The names of the tensors of the last layer that has any."""
    layers = [name for name, part in network.named_modules() if list(part.parameters(recurse=False))]
    return {name for name in network.state_dict() if name.rpartition(".")[0] == layers[-1]}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _error(file: str, why: str) -> ConfigError:
    return ConfigError(f"model.weights = {file!r}: {why}", key="model.weights", value=file)
