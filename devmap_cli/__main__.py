"""`python -m devmap_cli`."""

from devmap_cli.cli import main

main()
