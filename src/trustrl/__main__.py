"""Runs the command `trustrl` as `python -m trustrl`."""

from trustrl.cli import console

if __name__ == "__main__":
    console()
