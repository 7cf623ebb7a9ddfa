"""Semi-supervised federated learning. The public names, loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssfl import averaging, diversity, losses, schedule
    from ssfl.config import Config, load_config
    from ssfl.data import augment, split
    from ssfl.data.arrays import Data
    from ssfl.errors import SsflError
    from ssfl.federation import Fed, Labels, Look, Method, State, Step, Users
    from ssfl.fields import setting
    from ssfl.laws import check
    from ssfl.losses import Losses
    from ssfl.methods import parts
    from ssfl.predict import load_model
    from ssfl.stepping import Federation
    from ssfl.train import Result, resume, run

__version__ = "0.2.0"
__all__ = [
    "Config", "Data", "Fed", "Federation", "Labels", "Look", "Losses", "Method", "Result", "SsflError",
    "State", "Step", "Users", "__version__", "augment", "averaging", "check", "diversity",
    "load_config", "load_model", "losses", "parts", "resume", "run", "schedule", "setting", "split",
]  # fmt: skip

_HOMES = {
    "Config": "config",
    "Data": "data.arrays",
    "Fed": "federation",
    "Federation": "stepping",
    "Labels": "federation",
    "Look": "federation",
    "Losses": "losses",
    "Method": "federation",
    "Result": "train",
    "SsflError": "errors",
    "State": "federation",
    "Step": "federation",
    "Users": "federation",
    "check": "laws",
    "load_config": "config",
    "load_model": "predict",
    "resume": "train",
    "run": "train",
    "setting": "fields",
}
_MODULES = {"augment": "data.augment", "parts": "methods.parts", "split": "data.split"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ssfl.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"ssfl.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'ssfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
