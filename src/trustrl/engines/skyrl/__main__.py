"""`python -m trustrl.engines.skyrl ...`: SkyRL's `main_base`, its own arguments, after a look at its settings."""

from trustrl.engines.skyrl.entrypoint import main

if __name__ == "__main__":
    main()
