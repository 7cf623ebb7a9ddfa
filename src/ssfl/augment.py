"""The public functions of `data/augment.py`, importable as `ssfl.augment`."""

from ssfl.data.augment import below, strong, uniform, weak

__all__ = ["below", "strong", "uniform", "weak"]
