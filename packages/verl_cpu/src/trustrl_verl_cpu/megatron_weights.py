"""mbridge's loading and export of weights for Megatron-Core's local layers.

mbridge knows the names of transformer-engine's layers, which contain their norm, and of grouped experts. Megatron's
local layers have the same weights under other names. mbridge reads a model through `BridgeNames`, which renames them;
its own code then splits, gathers and converts every weight, under every kind of parallelism.
"""

import functools
import re
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trustrl.engines.common import seam
from trustrl_verl_cpu.megatron_layers import NO_FUSION

PACKAGE = "mbridge"

_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_LAYER = re.compile(r"(.*\blayers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)$")
_FUSED = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
_MARK = "trustrl_verl_cpu"


def bridge_name(name: str, *, is_moe_layer: bool) -> str:
    """Returns mbridge's name of a weight of Megatron's local layers.

    Example:
        >>> bridge_name("decoder.layers.0.input_layernorm.weight", is_moe_layer=False)
        'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'
        >>> bridge_name("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", is_moe_layer=True)
        'decoder.layers.0.mlp.experts.linear_fc1.weight3'
    """
    if match := _EXPERT.search(name):
        expert, layer, kind = match.groups()
        return f"{name[: match.start()]}.experts.{layer}.{kind}{expert}"
    if match := _LAYER.match(name):
        start, norm, kind = match.groups()
        # A router reads its norm's output too, so transformer-engine does not fuse that norm.
        if norm == "input_layernorm" or not is_moe_layer:
            return f"{start}{_FUSED[norm]}.layer_norm_{kind}"
    return name


class BridgeNames:
    """Model that mbridge reads: its weights under mbridge's names.

    Args:
        model: Megatron's model, without wrappers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        names = model.state_dict()
        self._moe = {name.removesuffix("mlp.router.weight") for name in names if name.endswith(".mlp.router.weight")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _renamed(self, name: str) -> str:
        match = _LAYER.match(name)
        return bridge_name(name, is_moe_layer=match is not None and match[1] in self._moe)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yields every parameter of this rank with mbridge's name."""
        for name, parameter in self._model.named_parameters():
            yield self._renamed(name), parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Returns every tensor of this rank by mbridge's name."""
        return {self._renamed(name): tensor for name, tensor in self._model.state_dict().items()}


def install() -> None:
    """Makes mbridge build Megatron's local layers, and load and export their weights. Later calls have no effect.

    Raises:
        EngineError: If mbridge does not have these names, or calls them in a different way.
    """
    bridge, llm_bridge, util = map(import_module, (f"mbridge.core.{name}" for name in ("bridge", "llm_bridge", "util")))
    model_bridge, language_bridge = bridge.Bridge, llm_bridge.LLMBridge
    if hasattr(model_bridge.load_weights, _MARK):
        return
    for owner, name, expected in (
        (model_bridge, "load_weights", ("self", "models", "weights_path", "memory_efficient")),
        (model_bridge, "export_weights", ("self", "models")),
        (language_bridge, "_build_base_config", ("self", "text_config_key", "kwargs")),
        (util, "unwrap_model", ("model", "module_instances")),
    ):
        seam.require_parameters(owner, name, expected, package=PACKAGE)
    seam.require_parameters(
        llm_bridge, "get_gpt_decoder_block_spec", ("config", "use_transformer_engine"), more=True,
        package="megatron-core",
    )  # fmt: skip
    if not hasattr(util.ModelType, "encoder_and_decoder"):  # megatron-core 0.18 dropped a kind that mbridge compares
        kind = util.ModelType.encoder_or_decoder
        vars(util)["ModelType"] = types.SimpleNamespace(encoder_or_decoder=kind, encoder_and_decoder=None)
    model_bridge.load_weights = _renaming(model_bridge.load_weights, util.unwrap_model)
    # mbridge broadcasts the parameters themselves, which warns in the next backward pass if torch has seen it.
    model_bridge.export_weights = _renaming(torch.no_grad()(model_bridge.export_weights), util.unwrap_model)
    language_bridge._build_base_config = _without_fusion(language_bridge._build_base_config)
    spec = llm_bridge.get_gpt_decoder_block_spec

    @functools.wraps(spec)
    def local_layers(config: Any, use_transformer_engine: bool, **more: Any) -> Any:
        return spec(config, use_transformer_engine=False, **more)

    setattr(llm_bridge, "get_gpt_decoder_block_spec", local_layers)  # noqa: B010


def _renaming(method: Any, unwrap: Any) -> Any:
    @functools.wraps(method)
    def renamed(self: Any, models: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, [BridgeNames(unwrap(model)) for model in models], *args, **kwargs)

    setattr(renamed, _MARK, True)
    return renamed


def _without_fusion(build: Any) -> Any:
    @functools.wraps(build)
    def _build_base_config(self: Any, text_config_key: str | None = None, **kwargs: Any) -> Any:
        self.extra_args |= NO_FUSION
        return build(self, text_config_key, **kwargs)

    return _build_base_config
