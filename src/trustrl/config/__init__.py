"""Settings: frozen dataclasses that validate themselves and load without torch."""
