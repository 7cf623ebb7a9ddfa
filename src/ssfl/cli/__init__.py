"""The command line: one small file per command.

Open `main.py` first; `verbs.py` has the help, completion and the answers to mistyped commands.
"""
