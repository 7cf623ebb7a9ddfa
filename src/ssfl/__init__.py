"""Semi-supervised federated learning. The public names, loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssfl import averaging, diversity, schedule
    from ssfl.config import Config, load_config
    from ssfl.data import augment, split
    from ssfl.data.arrays import Data
    from ssfl.errors import SsflError
    from ssfl.predict import load_model
    from ssfl.stepping import Federation
    from ssfl.train import Result, resume, run

__all__ = [
    "Config", "Data", "Federation", "Result", "SsflError", "augment", "averaging", "diversity", "load_config",
    "load_model", "resume", "run", "schedule", "split",
]  # fmt: skip

_HOMES = {
    "Config": "config",
    "Data": "data.arrays",
    "Federation": "stepping",
    "load_config": "config",
    "SsflError": "errors",
    "load_model": "predict",
    "Result": "train",
    "resume": "train",
    "run": "train",
}
_MODULES = {"augment": "data.augment", "split": "data.split"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ssfl.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"ssfl.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'ssfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
