"""Tables of the settings that each engine refuses. They load without the engine."""
