"""`python -m posttrain`."""

from posttrain.cli import main

main()
