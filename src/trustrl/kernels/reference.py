"""The definition of `token_logprobs`, with every logit in memory. Tests compare the other implementations with it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.kernels.logprob_outputs import TokenLogprobs, TopLogprobs, log_mass, wide_dtype


def logits_reference(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    *,
    temperature: float | Float[Tensor, " N"] = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "N V"]:
    """Returns `softcap · tanh((hidden @ head.T + bias) / softcap) / temperature`.

    The product is computed in the hidden states' dtype, everything else in float32 or better.
    """
    logits_NV = (hidden_ND @ head_VD.to(hidden_ND.dtype).T).to(wide_dtype(hidden_ND))
    if bias is not None:
        logits_NV = logits_NV + bias
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return logits_NV / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)


def token_logprobs_reference(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    token_ids_N: Int[Tensor, " N"],
    *,
    gather_ids: Int[Tensor, "N K"] | None = None,
    top_k: int = 0,
    entropy: bool = False,
    temperature: float | Float[Tensor, " N"] = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
) -> TokenLogprobs:
    """Returns the log-softmax of the logits at the requested ids.

    Example:
        >>> hidden, head = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> token_logprobs_reference(hidden, head, torch.tensor([0, 1])).logp
        tensor([-0.5514, -0.5514])
    """
    logits_NV = logits_reference(hidden_ND, head_VD, temperature=temperature, bias=bias, softcap=softcap)
    live_N = token_ids_N >= 0
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    token_N1 = token_ids_N.clamp(min=0).unsqueeze(-1)
    gathered = tail = top = None

    def mass_outside(ids_NK: Tensor) -> Tensor:
        known_NV = torch.zeros_like(logp_NV, dtype=torch.bool).scatter(-1, ids_NK, True).scatter(-1, token_N1, True)
        return torch.where(live_N, log_mass(logp_NV.masked_fill(known_NV, -torch.inf)), 0.0)

    if gather_ids is not None:
        empty_NK = (gather_ids < 0) | ~live_N.unsqueeze(-1)
        gathered = logp_NV.gather(-1, gather_ids.clamp(min=0)).masked_fill(empty_NK, -torch.inf)
        # Empty columns point at the sampled token, which is excluded in any case.
        tail = mass_outside(torch.where(gather_ids < 0, token_N1, gather_ids))
    if top_k:
        logp, ids = logp_NV.topk(top_k, dim=-1)
        dead_N1 = ~live_N.unsqueeze(-1)
        top = TopLogprobs(ids.masked_fill(dead_N1, -1), logp.masked_fill(dead_N1, -torch.inf), mass_outside(ids))
    return TokenLogprobs(
        logp=torch.where(live_N, logp_NV.gather(-1, token_N1).squeeze(-1), 0.0),
        logsumexp=torch.where(live_N, torch.logsumexp(logits_NV, dim=-1), 0.0),
        gathered_logp=gathered,
        tail_logp=tail,
        topk=top,
        entropy=torch.where(live_N, -(logp_NV.exp() * logp_NV).sum(-1), 0.0) if entropy else None,
    )
