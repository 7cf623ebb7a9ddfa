"""The global random generators of torch, Python and numpy: seeds, states, and what draws from them."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global random generators of torch, Python and numpy during a `with` block, and restores their
    states afterwards. So the initial weights depend only on the seed."""
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002


def random_states() -> dict[str, Any]:
    """Returns the states of the global random generators of torch, Python and numpy, by their names."""
    array = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy.random": (array["key"].tobytes(), array["pos"]),
    }


class FindDraws(TorchFunctionMode):
    """Finds out which torch function draws random numbers. While active, it records in `function` the name of
    the first one that draws any."""

    function = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not self.function and not torch.equal(before, torch.get_rng_state()):
            self.function = getattr(func, "__name__", str(func))
        return result
