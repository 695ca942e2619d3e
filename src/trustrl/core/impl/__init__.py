"""Implementations of the steps of `policy_loss`. `eager` is the definition; the others replace functions by name."""
