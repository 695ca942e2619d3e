"""Regions, one module per family. Clip, mask and projection are three ways to make one decision per token."""

from trustrl.core.regions.decision import Decision

__all__ = ["Decision"]
