"""The settings, and how they are read from TOML files, presets and `--set`.

Read `settings.py` first: it has every setting with its limits and its description.
"""
