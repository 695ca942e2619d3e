"""Runner: turns a recipe into an engine's configuration, its command, and a run directory. The engine trains."""
