"""Networks: the package's own, built from `layers.py`, and networks from outside.

Read `networks.py` first. `kernels/` has GPU kernels for many models at once.
"""
