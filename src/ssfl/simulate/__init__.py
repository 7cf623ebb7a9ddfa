"""The simulated federation: which users take part, which updates are accepted, and how good the model is.

Read `simulation.py` first. It runs the rounds of `federation.py` on one machine.
"""
