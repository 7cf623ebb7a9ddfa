"""Networks: the package's own, built from `layers.py`, and any `nn.Module` that a user brings.

Read `networks.py` first. `kernels/` has GPU kernels for many models at once.
"""
