"""`python -m flashflow`: the command line."""

from flashflow.cli import main

if __name__ == "__main__":
    main()
