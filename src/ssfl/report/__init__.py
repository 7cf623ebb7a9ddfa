"""A run, or several, as one HTML page and as figures.

Open `page.py` first; `gather.py` reads the run folder, `sections.py` writes the parts.
"""
