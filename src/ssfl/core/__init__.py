"""Pure functions on model vectors, random draws, losses and averages, and small helpers for all packages.

Nothing here depends on a config, a device or a run folder. Read `rows.py` first: all code treats a model as
one vector of numbers, called a row. "The paper" is Zhang et al. 2020, arXiv 2008.11364.
"""
