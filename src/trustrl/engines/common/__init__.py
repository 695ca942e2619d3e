"""Code shared by the engine adapters."""
