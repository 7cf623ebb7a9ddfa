"""The public functions of `core/averaging.py`, importable as `ssfl.averaging`."""

from ssfl.core.averaging import fedavg, grouping

__all__ = ["fedavg", "grouping"]
