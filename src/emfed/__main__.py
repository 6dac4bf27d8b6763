"""``python -m emfed`` is the command line."""

from emfed.cli.main import main

if __name__ == "__main__":
    main()
