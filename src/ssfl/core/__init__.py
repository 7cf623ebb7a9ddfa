"""Building blocks that every other package uses: pure functions for averaging models, drawing random numbers
and computing losses, and small helpers.

Nothing here depends on a config or a run folder. Read `rows.py` first: it shows how a model is stored as one
vector of numbers, called a row. "The paper" always means Zhang et al. 2020, arXiv 2008.11364.
"""
