"""Reports: one run, or several, as one HTML page and as figures.

Read `page.py` first. `gather.py` reads the run folder, and `sections.py` writes the parts.
"""
