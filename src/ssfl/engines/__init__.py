"""Engines train the users of a round and differ in speed alone.

Open `loop.py` first: plain PyTorch, the specification that all others must equal.
"""
