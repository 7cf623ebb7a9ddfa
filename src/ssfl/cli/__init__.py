"""The command line, with one small file per command.

Read `main.py` first. `verbs.py` has the help texts, shell completion and the answers to mistyped commands.
"""
