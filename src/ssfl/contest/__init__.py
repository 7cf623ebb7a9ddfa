"""Contests: comparisons of methods under one protocol.

Read `play.py` first. `protocol.py` has the rules. `standings.py` writes the table, the JSON file and the
picture.
"""
