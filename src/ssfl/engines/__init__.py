"""Engines: the code that trains the users of a round and the server. All engines compute the same results and
differ only in speed.

Read `loop.py` first. It is plain PyTorch, and it defines the results that the other engines must give.
"""
