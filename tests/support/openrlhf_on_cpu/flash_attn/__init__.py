"""Stub of flash-attention, which has no build without CUDA: OpenRLHF imports five names of it at load time."""
