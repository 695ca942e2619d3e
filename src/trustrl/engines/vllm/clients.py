"""Clients through which a trainer sends weights to an `LLM` object or to a vLLM server.

vLLM's protocol has four phases and leaves the prefix cache to the caller, so a client has five methods. Any object with
these methods is a client, such as one that calls Ray actors.
"""

from typing import Any, Protocol, runtime_checkable

from trustrl.engines.vllm.weight_reload import forget_prefixes, must_have_reset
from trustrl.errors import EngineError


@runtime_checkable
class SamplerClient(Protocol):
    """Protocol of vLLM's four phases, and of the reset that must follow them."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Opens the connection."""
        ...

    def start_weight_update(self) -> None:
        """Prepares the layers."""
        ...

    def update_weights(self, update_info: Any) -> None:
        """Receives and loads the weights. Returns when the last tensor has arrived."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Packs the layers."""
        ...

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Raises if it is not empty afterwards."""
        ...


class LocalClient:
    """Client for an `LLM` object of this process. Its engine may run in this process or in another."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Opens the connection."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepares the layers."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """Receives and loads the weights."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Packs the layers."""
        self._llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""
        forget_prefixes(self._llm)


class ServerClient:
    """Client for a vLLM server, which opens these routes only with VLLM_SERVER_DEV_MODE=1 in its environment."""

    def __init__(self, base_url: str, timeout_seconds: float = 300.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout = timeout_seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Opens the connection."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepares the layers."""
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receives and loads the weights."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Packs the layers."""
        self._post("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""
        must_have_reset(self._post("reset_prefix_cache")["success"])

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        import requests  # a dependency of vllm, not of trustrl

        response = requests.post(f"{self._base_url}/{path}", json=body, timeout=self._timeout)
        if response.status_code == 404:
            raise EngineError(
                f"The server at {self._base_url} has no route /{path}. "
                "Start it with VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if not response.ok:
            raise EngineError(f"/{path} must succeed, got {response.status_code} from the server: {response.text}")
        return response.json()
