"""Choices of the vocabulary pass that depend on the device."""

from torch import Tensor


def free_to_look(at: Tensor) -> bool:
    """Returns True if reading a value does not wait for a device (on CPU), so control flow may depend on it."""
    return at.device.type == "cpu"
