"""``python -m fedem`` is the command line."""

from fedem.cli.main import main

if __name__ == "__main__":
    main()
