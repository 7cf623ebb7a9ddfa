"""Comparison of methods under one protocol.

Open `play.py` first; `standings.py` writes the table, the file and the picture.
"""
