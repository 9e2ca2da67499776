"""`python -m server` is the same as the console script `vl2`."""

from server.cli import main

if __name__ == "__main__":
    main()
