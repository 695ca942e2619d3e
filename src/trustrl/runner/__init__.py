"""A recipe becomes an engine's own configuration and command, and a run directory. No trainer of our own."""
