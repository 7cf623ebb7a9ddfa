"""The command line, with one small file per command.

Read `main.py` first. `verbs.py` makes the help texts, the shell completion and the messages about mistyped
commands.
"""
