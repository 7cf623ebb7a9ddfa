"""Networks: the built-in ones, which are made of `layers.py`, a pretrained one (`backbones.py`), and any
`nn.Module` that a person brings (`external.py`).

Read `networks.py` first. The folder `kernels` has GPU code that computes the layers of many models together.
"""
