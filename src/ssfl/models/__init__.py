"""Networks: the package's own, built from `layers.py`, and networks from outside.

Open `networks.py` first; `kernels/` has GPU kernels for many models at once.
"""
