"""Kernels that are not used unless the environment asks for them."""

import os


def on_trial() -> bool:
    """Whether kernels are used that were checked and timed one by one, but not yet in whole training steps.

    They are those of `triton_tma.py` and `triton_batch.py`; the environment says SSFL_KERNELS=trial.
    """
    return os.environ.get("SSFL_KERNELS") == "trial"
