"""verl's sender of weights to SGLang, with the session around an update that SGLang has demanded since 0.5.21.

verl 0.9.1 is written for an older SGLang, which cannot return the log-probs of kept ids. A verl that opens sessions
itself, and an SGLang without them, are left as they are.

Seam: `ServerAdapter.update_weights(weights, ...)`, its `_engine`, and `AsyncHttpServerAdapter._make_async_request`.
      Imports SGLang.
"""

import abc
from typing import Any

from verl.workers.rollout.sglang_rollout.http_server_engine import (  # pyright: ignore[reportMissingImports]
    AsyncHttpServerAdapter,
)
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter  # pyright: ignore[reportMissingImports]

from trustrl.engines.common import seam

seam.require_parameters(ServerAdapter, "update_weights", ("self", "weights"), more=True)
seam.require_parameters(AsyncHttpServerAdapter, "_make_async_request", ("self", "endpoint", "payload"), more=True)


async def begin_weight_update(self: Any, selector: str = "all") -> None:
    """Opens a session."""
    await self._make_async_request("begin_weight_update", {"selector": selector})


async def end_weight_update(self: Any) -> None:
    """Closes the session."""
    await self._make_async_request("end_weight_update", {})


SESSIONS = (begin_weight_update, end_weight_update)

NEEDS_SESSIONS = {call.__name__ for call in SESSIONS} <= AsyncHttpServerAdapter.__abstractmethods__
"""True if SGLang demands sessions and verl does not open them."""

if NEEDS_SESSIONS:
    for call in SESSIONS:
        setattr(AsyncHttpServerAdapter, call.__name__, call)
    abc.update_abstractmethods(AsyncHttpServerAdapter)


class WeightSender(ServerAdapter):
    """verl's sender, which sends all weights of an update in one session."""

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Sends every weight. All ranks iterate over the weights; the first rank of a server opens the session."""
        await self._init_server_adapter()
        engine = self._engine if NEEDS_SESSIONS else None
        if engine is None or not self._is_server_tp_leader():
            await super().update_weights(weights, *args, **kwargs)
            return
        await begin_weight_update(engine)
        try:
            await super().update_weights(weights, *args, **kwargs)
        finally:
            await end_weight_update(engine)
