"""`python -m k3`."""

from k3.cli import main

if __name__ == "__main__":
    main()
