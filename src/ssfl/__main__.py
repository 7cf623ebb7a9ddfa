"""`python -m ssfl` is the command `ssfl`."""

from ssfl.cli import main

main()
