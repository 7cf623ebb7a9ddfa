"""Layers that compute many models at once on a GPU, as operators that PyTorch can differentiate and compile.

The images of n models are stored one model after another, [n · B, C, H, W], in bfloat16 and channels last in
memory. Parameters are [n, ...]. The operators are in `convolution.py` and `normalisation.py`; the Triton
kernels are in the files beside them. Each operator has a plain equivalent in `models/layers.py`, which is
used wherever the kernels cannot be.
"""
