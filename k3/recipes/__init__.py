"""Named runs as Python functions, the arms that change one idea of them, and `--set a.b=1`."""
