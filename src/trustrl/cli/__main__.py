"""`python -m trustrl.cli`: the command `trustrl`, also under launchers that start modules."""

from trustrl.cli import console

if __name__ == "__main__":
    console()
