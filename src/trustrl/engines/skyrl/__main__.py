"""`python -m trustrl.engines.skyrl ...`: SkyRL's `main_base` with its own arguments, after a check of its settings."""

from trustrl.engines.skyrl.losses import main

if __name__ == "__main__":
    main()
