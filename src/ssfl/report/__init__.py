"""Reports on one run or on several runs, as one HTML page and as figures.

Read `page.py` first. `gather.py` reads the run folders, and `sections.py` makes the sections of the page.
"""
