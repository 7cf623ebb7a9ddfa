"""Semi-supervised federated learning. This module offers the public names of the package, and imports each
when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssfl.core.version import VERSION

if TYPE_CHECKING:
    from ssfl import augment, averaging, diversity, schedule, split
    from ssfl.config.loading import Config
    from ssfl.core import draws, losses
    from ssfl.core.fields import setting
    from ssfl.core.losses import Losses
    from ssfl.data.arrays import Data
    from ssfl.errors import SsflError
    from ssfl.federation import Fed, Labels, Look, Method, State, Step, Users
    from ssfl.methods import parts
    from ssfl.runs.choose import load_config
    from ssfl.runs.evaluate import evaluate
    from ssfl.runs.laws import check
    from ssfl.runs.predict import export, load_model, predict
    from ssfl.runs.result import Result
    from ssfl.runs.stepping import Federation
    from ssfl.runs.train import resume, run

__version__ = VERSION
__all__ = [
    "Config", "Data", "Fed", "Federation", "Labels", "Look", "Losses", "Method", "Result", "SsflError",
    "State", "Step", "Users", "__version__", "augment", "averaging", "check", "diversity",
    "draws", "evaluate", "export", "load_config", "load_model", "losses", "parts", "predict", "resume", "run",
    "schedule", "setting", "split",
]  # fmt: skip

_HOMES = {
    "Config": "config.loading",
    "Data": "data.arrays",
    "Fed": "federation",
    "Federation": "runs.stepping",
    "Labels": "federation",
    "Look": "federation",
    "Losses": "core.losses",
    "Method": "federation",
    "Result": "runs.result",
    "SsflError": "errors",
    "State": "federation",
    "Step": "federation",
    "Users": "federation",
    "check": "runs.laws",
    "evaluate": "runs.evaluate",
    "export": "runs.predict",
    "load_config": "runs.choose",
    "load_model": "runs.predict",
    "predict": "runs.predict",
    "resume": "runs.train",
    "run": "runs.train",
    "setting": "core.fields",
}


_MODULES = {"draws": "core.draws", "losses": "core.losses", "parts": "methods.parts"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ssfl.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"ssfl.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'ssfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
