"""The public functions of `data/split.py`, importable as `ssfl.split`."""

from ssfl.data.split import measured_skew, skewed

__all__ = ["measured_skew", "skewed"]
