"""The switch for kernels that are used only on request."""

import os


def on_trial() -> bool:
    """Returns whether the kernels of `triton_tma.py` and `triton_batch.py` are switched on.

    They were checked and timed one by one, but not yet in whole training steps. The environment variable
    SSFL_KERNELS=trial switches them on.
    """
    return os.environ.get("SSFL_KERNELS") == "trial"
