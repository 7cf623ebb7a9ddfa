"""Networks: ours, built from `layers.py`, and anybody else's.

Open `networks.py` first; `kernels/` has what a GPU does faster for many models at once.
"""
