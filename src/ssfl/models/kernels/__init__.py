"""Convolution and normalisation of many models at once on a GPU, as operators that PyTorch can differentiate
and compile.

The images of n models are stored one model after another, [n · B, C, H, W], in bfloat16 and channels last in
memory. Parameters are [n, ...]. The operators are in `convolution.py` and `normalisation.py`, and their
Triton kernels are in the other files of this folder. `models/layers.py` has plain PyTorch code for the same
results, which is used where the kernels cannot run.
"""
