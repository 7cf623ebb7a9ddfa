"""Images: where they come from, who gets them, and how they are augmented.

Open `sources.py` first; `split.py` deals images to users, `augment.py` makes the views.
"""
