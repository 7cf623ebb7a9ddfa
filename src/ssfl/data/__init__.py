"""Images: where they come from, who gets them, and how they are augmented.

Open `sources.py` first; `split.py` divides images among users, `augment.py` makes the views.
"""
