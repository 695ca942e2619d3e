"""tinker: regions on sampled tokens as custom losses, traced for its service or run in your process."""

from trustrl.engines.tinker.losses import (
    create_loss as create_loss,
    input_ranks as input_ranks,
    loss_hook as loss_hook,
    traceable_loss as traceable_loss,
    traced_data as traced_data,
)

__all__ = ["create_loss", "input_ranks", "loss_hook", "traceable_loss", "traced_data"]
