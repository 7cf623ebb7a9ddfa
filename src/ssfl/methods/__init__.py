"""The training methods, one file each, and the search for a method by its name or import path. `grouping.py`
is the method of the paper (Zhang et al. 2020), and `anchored.py` is the recommended one.

Functions that several methods share are in `parts.py`. Names and settings can be checked without importing
torch, which would take seconds.
"""

import ast
import difflib
import inspect
from collections.abc import Collection
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssfl.core import outside
from ssfl.core.events import ROUND_FIELDS
from ssfl.core.fields import closest, setting
from ssfl.errors import ConfigError, MethodError

if TYPE_CHECKING:
    from ssfl.federation import Method

METHODS = {
    "anchored": "anchored:Anchored",
    "alternate": "alternate:Alternate",
    "grouping": "grouping:Grouping",
    "crl-gn": "crl_gn:CrlGn",
    "crl-bn": "crl_bn:CrlBn",
    "self-training": "self_training:SelfTraining",
    "supervised": "supervised:Supervised",
    "fixmatch": "fixmatch:FixMatch",
    "data-sharing": "data_sharing:DataSharing",
    "easgd": "easgd:Easgd",
    "overlap-sgd": "overlap_sgd:OverlapSgd",
    "fedmatch": "fedmatch:FedMatch",
    "semifl": "semifl:SemiFL",
    "fl2": "fl2:Fl2",
    "rscfed": "rscfed:RscFed",
    "cbafed": "cbafed:CbaFed",
    "fedprox": "fedprox:FedProx",
    "flexmatch": "flexmatch:FlexMatch",
    "freematch": "freematch:FreeMatch",
    "server-only": "server_only:ServerOnly",
}
"""The built-in methods by name, each with the module and the class that implement it."""
DEFAULT = "anchored"
BASELINE = "server-only"
"""The method that others are compared with by default: the server trains alone, without users."""

MISSPELT = 0.85
"""How similar (see `difflib`) the name of a function must be to that of one of `ssfl.Method`, to be taken for
a misspelling of it."""


def check_name(name: str) -> None:
    """Raises ConfigError if there is no built-in method of this name. An import path of a person's own method
    is accepted, and checked only when it is loaded."""
    if name in METHODS or outside.is_outside(name):
        return
    close = closest(name, METHODS)
    hint = f"Did you mean {close}?" if close else f"Choose one of {', '.join(METHODS)}."
    if name.lower() == "fedavg":
        close, hint = "crl-gn", "FedAvg with pseudo-labels is crl-gn, and with true labels supervised."
    raise ConfigError(
        f"method.name = {name!r}: there is no such method. {hint}",
        key="method.name",
        value=name,
        fix=f"method.name={close}" if close else None,
    )


def find(name: str) -> "type[Method]":
    """Returns the class of a method, given its built-in name or the import path of a person's own method.
    Raises ConfigError if there is no such method."""
    check_name(name)
    if name not in METHODS:
        return _outside(name)
    file, _, class_name = METHODS[name].partition(":")
    method: type[Method] = getattr(import_module(f"ssfl.methods.{file}"), class_name)
    method.called = name
    return method


@cache
def settings_of(name: str) -> type | None:
    """Returns a dataclass with the settings of a built-in method, or None for a person's own method.

    The settings are read from the method's source file without importing torch, which would take seconds. So
    mistakes in settings are reported at once.
    """
    if name not in METHODS:
        return None
    file, _, class_name = METHODS[name].partition(":")
    tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text("utf-8"))
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    kind.bases, kind.decorator_list = [], []
    kind.body = [
        node
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    ] or [ast.Pass()]
    names: dict[str, Any] = {"setting": setting, "field": field, "__name__": __name__}
    exec(compile(ast.fix_missing_locations(ast.Module([kind], [])), file, "exec"), names)
    return dataclass(frozen=True)(names[class_name])


def recorded(name: str, values: dict[str, Any]) -> "Method":
    """Returns a stand-in for a person's own method whose file was not supplied. `values` are the method's
    settings as the run recorded them. A report can read these settings from the stand-in, but the stand-in
    cannot train."""
    from ssfl.federation import Method

    fields = [(key, type(value), field(default=value)) for key, value in values.items()]
    kind = make_dataclass("Recorded", fields, bases=(Method,), frozen=True, namespace={"called": name})
    kind.__doc__ = "A method from outside the package."
    method: Method = kind()
    return method


def require(method: Any) -> "Method":
    """Returns `method` if it is an object of an `ssfl.Method` class without mistakes that can be found before
    training. Otherwise raises an error."""
    from ssfl.federation import NEEDS, USES, Method

    if isinstance(method, type) and issubclass(method, Method):
        name = method.__name__
        raise ConfigError(f"method is the class {name}: pass an object, method={name}()", key="method")
    if not isinstance(method, Method):
        raise ConfigError(
            f"method = {method!r} is a {type(method).__name__}: pass an object of an ssfl.Method class; "
            'a name goes into the config: ssfl.load_config("quickstart", ["method.name=grouping"])',
            key="method",
            value=method,
        )
    _require_class(type(method))
    for hook, known in (("needs", tuple(NEEDS)), ("uses", USES)):
        words = getattr(method, hook)()
        listed = isinstance(words, Collection) and not isinstance(words, str)
        if not listed or not all(word in known for word in words):
            raise MethodError(
                f"{type(method).__name__}.{hook} returned {words!r}: return a tuple, with words of "
                f"{', '.join(known)}",
                key=hook,
                value=words,
            )
    return method


def _require_class(kind: "type[Method]") -> None:
    """Raises MethodError for mistakes in a class of methods that would otherwise have no effect, or a
    confusing one: a forgotten @dataclass, a misspelt function, a field that hides an attribute of
    `ssfl.Method`, or a metric with the name of another."""
    from ssfl.federation import METRICS, Method

    hooks = ["label", *(name for name, value in vars(Method).items() if inspect.isfunction(value))]
    for part in kind.__mro__:
        if not issubclass(part, Method) or part is Method:
            continue
        annotated = [n for n, hint in inspect.get_annotations(part).items() if "ClassVar" not in str(hint)]
        if annotated and "__dataclass_fields__" not in vars(part):
            raise MethodError(
                f"the class {part.__name__} is not a dataclass, so its fields {', '.join(annotated)} are "
                f"not settings: write @dataclass(frozen=True) above class {part.__name__}",
                key=part.__name__,
            )
        for name, value in vars(part).items():
            close = difflib.get_close_matches(name, hooks, 1, MISSPELT)
            if close and not hasattr(Method, name) and not name.startswith("_") and inspect.isroutine(value):
                raise MethodError(
                    f"ssfl.Method has no function {name}, which {part.__name__} defines: did you mean "
                    f"{close[0]}? If not, call it _{name}",
                    key=name,
                    fix=close[0],
                )
    for field_ in fields(kind):
        if hasattr(Method, field_.name):
            raise MethodError(
                f"{kind.__name__} has a field {field_.name}, but ssfl.Method has an attribute of this name: "
                f"rename the field, or annotate it as ClassVar to set this attribute",
                key=field_.name,
            )

    metrics: Any = kind.metrics
    if isinstance(metrics, str):
        raise MethodError(
            f"{kind.__name__}.metrics is the text {metrics!r}: write a tuple, ({metrics!r},)",
            key="metrics",
        )
    for name in metrics:
        if name in (*ROUND_FIELDS, *METRICS):
            raise MethodError(
                f"{kind.__name__}.metrics has {name!r}, which is the name of another value in the events of "
                "rounds: choose another name",
                key=name,
            )


def flag(method: "Method") -> str:
    """Returns the remark that tables of results show beside a method. This is the method's `note`, if it has
    one. Otherwise it is a remark that users know their labels, or "" if they do not."""
    knows_labels = "labels" in method.needs()
    return method.note or ("users know the labels of their images" if knows_labels else "")


def _outside(name: str) -> "type[Method]":
    """Imports a person's own method from its import path and returns its class. Raises ConfigError if it is
    not a subclass of ssfl.Method."""
    from ssfl.federation import Method

    method = outside.load(name, "method.name")
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(
            f"method.name = {name!r} is not a subclass of ssfl.Method: write `class "
            f"{name.rpartition(':')[2]}(ssfl.Method)`",
            key="method.name",
            value=name,
        )
    _require_class(method)
    method.called = name
    return method
