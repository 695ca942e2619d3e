"""How a region decides: clip, mask and project are three ways to make one decision per token."""

from trustrl.regions.decision import Decision

__all__ = ["Decision"]
