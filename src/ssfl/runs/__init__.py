"""A run, from its config to its folder and its model: prepare, train, resume, log, and use the model.

Read `train.py` first, then `round_loop.py`. `folder.py` says what a run folder contains.
"""
