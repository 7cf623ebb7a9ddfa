"""The public functions of `core/schedule.py`, importable as `ssfl.schedule`."""

from ssfl.core.schedule import learning_rate

__all__ = ["learning_rate"]
