"""Runs the command `trustrl` as `python -m trustrl.cli`, for launchers that start modules."""

from trustrl.cli import console

if __name__ == "__main__":
    console()
