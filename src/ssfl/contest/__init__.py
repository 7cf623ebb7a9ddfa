"""Contests: comparisons of methods under one protocol.

Read `play.py` first. `protocol.py` has the rules. `standings.py` writes the JSON file and the picture,
`texts.py` the table and its conclusion. `refused.py` has settings that cannot be changed.
"""
