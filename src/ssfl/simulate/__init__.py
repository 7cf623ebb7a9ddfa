"""Simulates a federation on one machine: draws the users of each round, trains them, checks and averages
their updates, and evaluates the model.

Read `simulation.py` first. It runs the rounds of `federation.py`.
"""
