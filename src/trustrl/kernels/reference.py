"""The definition, with every logit in memory. What the other implementations are held against."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.kernels.outputs import TokenLogprobs, wide_dtype


def token_logprobs_reference(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    token_ids_N: Int[Tensor, " N"],
    *,
    gather_ids_NK: Int[Tensor, "N K"] | None = None,
    entropy: bool = False,
    temperature: float | Float[Tensor, " N"] = 1.0,
    bias_V: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
) -> TokenLogprobs:
    """log-softmax of `softcap · tanh((hidden @ head.T + bias) / softcap) / temperature`, read at the ids asked for.

    Example:
        >>> hidden, head = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> token_logprobs_reference(hidden, head, torch.tensor([0, 1])).logp
        tensor([-0.5514, -0.5514])
    """
    logits_NV = (hidden_ND @ head_VD.T).to(wide_dtype(hidden_ND))
    if bias_V is not None:
        logits_NV = logits_NV + bias_V
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    logits_NV = logits_NV / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    token_N1 = token_ids_N.unsqueeze(-1)
    gathered = tail = None
    if gather_ids_NK is not None:
        gathered = logp_NV.gather(-1, gather_ids_NK.clamp(min=0)).masked_fill(gather_ids_NK < 0, -torch.inf)
        # Empty columns point at the sampled token, which is known anyway.
        known_NK = torch.where(gather_ids_NK < 0, token_N1, gather_ids_NK)
        known_NV = torch.zeros_like(logp_NV, dtype=torch.bool).scatter(-1, known_NK, True).scatter(-1, token_N1, True)
        tail = torch.logsumexp(logp_NV.masked_fill(known_NV, -torch.inf), dim=-1)
    return TokenLogprobs(
        logp=logp_NV.gather(-1, token_N1).squeeze(-1),
        logsumexp=torch.logsumexp(logits_NV, dim=-1),
        gathered_logp=gathered,
        tail_logp=tail,
        entropy=-(logp_NV.exp() * logp_NV).sum(-1) if entropy else None,
    )
