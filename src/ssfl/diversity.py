"""The public functions of `core/diversity.py`, importable as `ssfl.diversity`."""

from ssfl.core.diversity import gradient_diversity

__all__ = ["gradient_diversity"]
