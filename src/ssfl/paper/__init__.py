"""The paper's experiments: what was printed, how to run it, and what came out.

Open `rows.py` first: the fifty rows as data.
"""
