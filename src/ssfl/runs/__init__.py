"""A run, from its config to its result: prepare it, train, resume, log, and use the trained model.

Read `train.py` first, then `round_loop.py`. `folder.py` says what a run folder contains.
"""
