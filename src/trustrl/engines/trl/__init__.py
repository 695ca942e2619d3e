"""TRL's `GRPOTrainer` with a trust region: `TrustRegionGRPOTrainer(..., region=trustrl.preset("dppo-binary-tv"))`."""

from trustrl.engines.trl.trainer import (
    TrustRegionGRPOTrainer as TrustRegionGRPOTrainer,
    TrustRegionMixin as TrustRegionMixin,
)

__all__ = ["TrustRegionGRPOTrainer", "TrustRegionMixin"]
