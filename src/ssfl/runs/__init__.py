"""A run from its config to its folder: assembled, trained, resumed, tracked, used.

Open `train.py` first; `folder.py` says what a run folder holds.
"""
