"""Pure functions on rows of weights, draws, losses and averages, and helpers that all packages use.

Nothing here depends on a config, a device or a run folder. Open `rows.py` first: a model is a row.
"""
