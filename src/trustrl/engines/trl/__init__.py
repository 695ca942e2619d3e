"""TRL's `GRPOTrainer` with a region: `TrustRegionGRPOTrainer(..., region=trustrl.preset("dppo-binary-tv-capped"))`.

`record(trainer)` records the tokens of a stock `GRPOTrainer`. `rollout_fields(prompts, records)` is the result of a
`rollout_func`.
"""

from trustrl.optional_imports import require

require("trl", advice='Run `pip install "trustrl[trl]"`.')

from trustrl.engines.trl.sampled_rows import rollout_fields as rollout_fields
from trustrl.engines.trl.stock_record import record as record
from trustrl.engines.trl.trainer import (
    TrustRegionGRPOTrainer as TrustRegionGRPOTrainer,
    TrustRegionMixin as TrustRegionMixin,
)

__all__ = ["TrustRegionGRPOTrainer", "TrustRegionMixin", "record", "rollout_fields"]
