"""TRL 1.15 computes its output layer with Triton only; without it, its definition in plain torch stands in.

Most trainers here make one update per rollout, or a few small ones: that their region does not act is expected.
"""

import warnings

import pytest


@pytest.fixture(autouse=True)
def regions_may_be_idle(our_warnings_are_errors):
    with warnings.catch_warnings():
        for message in (".* cannot act: ", ".* masked no token in the first batch"):
            warnings.filterwarnings("ignore", message)
        yield


class PlainHead:
    """What `ChunkedLogProbFunction` computes, from whole logits."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, chunk_size, softcap, scale, outputs):
        import torch

        logits = (
            torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float()) * scale
        )
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logp = torch.log_softmax(logits / temperature, dim=-1)
        entropy = -(logp.exp() * logp).sum(-1) if "entropy" in outputs else None
        return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy, None, None, None


@pytest.fixture(autouse=True, scope="session")
def trl_computes_its_head_on_a_cpu():
    try:
        from trl.trainer import utils
    except ImportError:
        return
    if getattr(utils, "_ChunkedLogProbFunction", None) is None:
        utils._ChunkedLogProbFunction = PlainHead
