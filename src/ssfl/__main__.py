"""`python -m ssfl` is the command `ssfl`."""

from ssfl.cli.main import main

main()
