"""The public functions of `data/augment.py`, importable as `ssfl.augment`."""

from ssfl.data.augment import strong, uniform, weak

__all__ = ["strong", "uniform", "weak"]
