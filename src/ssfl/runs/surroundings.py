"""What surrounds a run: the same bits again, and a clear word where memory ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ssfl.errors import SsflError


@contextmanager
def enough_memory() -> Iterator[None]:
    """Running out of memory is a matter of settings."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not out:
            raise
        raise SsflError(
            "not enough memory: lower train.batch_size, run.users_at_once, federation.period or data.size"
        ) from error


@contextmanager
def reproducible() -> Iterator[None]:
    """The same bits every time, where torch can; its global settings are put back afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    products = torch.backends.cuda.matmul.allow_tf32
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is first used
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # nothing here reads what it did not write
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = cudnn
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.set_num_threads(threads)
