"""A run, from its config to its folder and its model: assemble, train, resume, track, use.

Open `train.py` first, then `round_loop.py`; `folder.py` says what a run folder holds.
"""
