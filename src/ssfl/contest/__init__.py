"""Contests: comparisons of methods under one protocol.

Read `play.py` first. `standings.py` writes the table, the JSON file and the picture.
"""
