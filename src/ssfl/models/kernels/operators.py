"""Makes operators of PyTorch from Python functions."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def operator(name: str, gradient: bool = True) -> Callable[[F], F]:
    """Returns a decorator that makes a function an operator with this name, like "ssfl::convolve". Its code
    stays unknown to torch's compiler. If `gradient` is false, asking for its gradient is an error. Otherwise
    `torch.library.register_autograd` must be called for it.

    `torch.library.custom_op` does the same. But its operators import the compiler when they are first called,
    which takes seconds, even if nothing is compiled.
    """

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(f"the operator {name} has no gradient")

    def made(function: F) -> F:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "default", function)
        if not gradient:
            torch.library.register_autograd(name, refuse)
        namespace, short = name.split("::")
        return cast(F, getattr(getattr(torch.ops, namespace), short).default)

    return made


def fake(name: str) -> Callable[[F], F]:
    """Returns a decorator for the function that tells torch's compiler which shapes and types an operator's
    results have."""
    return cast(Callable[[F], F], torch.library.register_fake(name))
