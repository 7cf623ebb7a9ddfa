"""The simulated federation: who takes part, whom to trust, how good the model is.

Open `simulation.py` first; it plays the rounds of `federation.py` on one machine.
"""
