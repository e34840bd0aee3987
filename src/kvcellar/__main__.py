"""`python -m kvcellar` is the `kvcellar` command."""

from .frontends.cli import main

if __name__ == "__main__":
    main()
