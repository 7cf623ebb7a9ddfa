"""Context managers for a run: one makes results reproducible, one gives a clear error if memory runs out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ssfl.errors import SsflError


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that the memory is full. On a CPU, torch raises a plain RuntimeError for
    that, which is recognised by its text."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turns an out-of-memory error inside the `with` block into an SsflError that names the settings to
    lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise SsflError(
            "not enough memory: lower train.batch_size, run.users_at_once, federation.period or data.size"
        ) from error


@contextmanager
def reproducible() -> Iterator[None]:
    """Makes torch as deterministic as possible inside the `with` block, so that a run can be repeated.
    Restores torch's global settings afterwards."""
    before = torch.get_deterministic_debug_mode()
    threads = torch.get_num_threads()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    products = torch.backends.cuda.matmul.allow_tf32
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is first used
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # not use_deterministic_algorithms: it imports torch's compiler, which takes as long as importing torch
    torch.set_deterministic_debug_mode("warn")
    # filling is not needed, because nothing here reads memory that it did not write
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = cudnn
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.set_num_threads(threads)
