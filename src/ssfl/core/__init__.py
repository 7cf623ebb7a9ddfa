"""Pure functions on rows of weights, draws, losses and averages, and what every part needs.

Nothing here knows a config, a device or a file. Open `rows.py` first: a model is a row.
"""
