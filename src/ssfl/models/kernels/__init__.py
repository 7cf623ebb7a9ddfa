"""Layers of many models at once on a GPU, as operators that PyTorch can differentiate and compile.

Images of n models lie one model after another, [n · B, C, H, W], in bfloat16, channels last in memory;
parameters are [n, ...]. The operators are in `convolution.py` and `normalisation.py`, their arithmetic
in Triton beside them. Each has a plain equivalent in `models/layers.py`, which everything else uses.
"""
