"""Engines: the code that trains the users of a round. Engines differ only in speed.

Read `loop.py` first. It is plain PyTorch, and the other engines must give the same results.
"""
