"""Makes `python -m ssfl` the same as the command `ssfl`."""

from ssfl.cli.main import main

main()
