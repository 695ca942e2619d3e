"""TRL's `GRPOTrainer` with a trust region: `TrustRegionGRPOTrainer(..., region=trustrl.preset("dppo-binary-tv"))`.

`record(trainer)` records the tokens of a stock `GRPOTrainer`.
"""

from trustrl.engines.trl.stock_record import record as record
from trustrl.engines.trl.trainer import (
    TrustRegionGRPOTrainer as TrustRegionGRPOTrainer,
    TrustRegionMixin as TrustRegionMixin,
)

__all__ = ["TrustRegionGRPOTrainer", "TrustRegionMixin", "record"]
