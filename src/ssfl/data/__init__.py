"""Images: where they come from, who owns them, and how they are augmented.

Read `sources.py` first. `split.py` divides images among users, and `augment.py` makes the weak and strong
views.
"""
