"""A micro-batch as slime and miles have it, and the losses that their own dispatchers make of it.

Both run on one rank, with real process groups of gloo. The vocabulary has two words: the sampled token and the rest, so
that log-probs can be chosen.
"""

import argparse
import inspect
import socket

import torch
import torch.distributed as dist
from torch import Tensor

PROMPT = 2
FLAGS = {
    "loss_type": "custom_loss", "trustrl_region": "dppo-binary-tv", "trustrl_metrics": "all",
    "calculate_per_token_loss": False, "recompute_loss_function": False, "allgather_cp": False,
    "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None,
    "entropy_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k3", "use_unbiased_kl": False,
    "use_rollout_logprobs": False, "use_tis": False, "get_mismatch_metrics": False, "use_opsm": False,
    "custom_tis_function_path": None, "custom_pg_loss_reducer_function_path": None,
    "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "log_probs_chunk_size": -1,
    "rollout_batch_size": 2, "n_samples_per_prompt": 4, "global_batch_size": 4, "context_parallel_size": 1,
}  # fmt: skip
"""The arguments that both losses read, at their defaults, with the region's."""


def group() -> None:
    """Starts the process group of one rank, once."""
    if not dist.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


def arguments(path: str, **more: object) -> argparse.Namespace:
    """slime's and miles' arguments."""
    return argparse.Namespace(**FLAGS | {"custom_loss_function_path": path} | more)


def logits(logp: Tensor) -> Tensor:
    """(1, tokens, 2) whose first word has the log-prob `logp` at each response token. Prompts get even odds."""
    rows = len(logp)
    rest = torch.log(-torch.expm1(logp.double())).float()
    even = torch.zeros(rows, PROMPT - 1, 2)
    last = torch.zeros(rows, 1, 2)
    return torch.cat([even, torch.stack([logp, rest], -1), last], 1).reshape(1, -1, 2)


def batch(tokens) -> dict:
    """A micro-batch with one response per row of a `parity.Batch`; all responses have its width."""
    rows, width = tokens.logp.shape
    masks = list(tokens.in_loss.float())
    return {
        "unconcat_tokens": [torch.zeros(PROMPT + width, dtype=torch.long) for _ in range(rows)],
        "total_lengths": [PROMPT + width] * rows,
        "response_lengths": [width] * rows,
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "advantages": list(tokens.advantage),
        "log_probs": list(tokens.proximal_logp),
        "rollout_log_probs": list(tokens.behavior_logp),
        "ref_log_probs": list(tokens.proximal_logp - 0.1),
    }


def result(dispatch, spied, args, tokens, data=None):
    """The gradient by the log-probs, the gradient by the logits, and the metrics, of the engine's own dispatcher.

    Args:
        dispatch: Function of the arguments, a micro-batch and the logits; calls the engine's `loss_function`.
        spied: List that receives every log-prob tensor that the engine's own function returns.
        args: The arguments.
        tokens: A `parity.Batch`.
        data: The micro-batch, if it is not `batch(tokens)`.
    """
    spied.clear()
    given = logits(tokens.logp.detach()).requires_grad_(True)
    loss, _, log = dispatch(args, batch(tokens) if data is None else data, given)
    by_logp = torch.autograd.grad(loss, spied, retain_graph=True, allow_unused=True)
    (by_logits,) = torch.autograd.grad(loss, given)
    metrics = dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))
    return torch.stack(by_logp), by_logits, metrics


def spy(monkeypatch, module) -> list:
    """Keeps the log-probs that the engine's own `get_log_probs_and_entropy` returns, in a list."""
    spied, own = [], module.get_log_probs_and_entropy

    def kept(*args, **kwargs):
        found = own(*args, **kwargs)
        spied.extend((found[1] if isinstance(found, tuple) else found)["log_probs"])
        return found

    kept.__signature__ = inspect.signature(own)
    monkeypatch.setattr(module, "get_log_probs_and_entropy", kept)
    return spied
