"""Settings and how they are read: TOML files, presets and --set.

Open `settings.py` first: every setting with its limits and docstring.
"""
