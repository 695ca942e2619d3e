"""Functions of other libraries that compute the sampled token's log-prob from hidden states, behind one signature.

    pip install torch==2.13.0
    pip install --no-deps -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py
    python benchmarks/peers.py --tokens 600 --hidden 16 --vocab 40000 --dtype bfloat16

Every peer calls the installed package's function with the package's chunk sizes; no code is copied. A package that
cannot be imported is reported on stderr and skipped. As a script, this file compares each peer with float64.

All peers except the plain paths target GPUs. On a CPU they run fallbacks in eager torch, so times and memory measured
here say nothing about their GPU kernels. prime-rl's fused head is missing because the package is not on PyPI.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Head(Protocol):
    """Function from hidden [N, H], head [V, H] and token_ids [N] to log-probs [N] and entropies [N], at temperature 1.

    Differentiable in hidden and head. The entropy is None if it is not requested or the peer does not compute it.
    """

    def __call__(
        self, hidden: Tensor, head: Tensor, token_ids: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the forward pass."""
        ...


@dataclass(frozen=True)
class Peer:
    """One implementation: its package, its function, and a note on what it does on a CPU."""

    name: str
    package: str
    version: str
    function: Head
    gives_entropy: bool  # with a gradient
    note: str


def plain(hidden: Tensor, head: Tensor, token_ids: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Computes the textbook form: all logits, upcast to float32, log_softmax, gather."""
    logp_NV = torch.log_softmax((hidden @ head.T).float(), -1)
    logp_N = logp_NV.gather(-1, token_ids[:, None])[:, 0]
    return logp_N, -(logp_NV.exp() * logp_NV).sum(-1) if entropy else None


def load_plain() -> Peer:
    note = "holds several float32 arrays of the size of the logits at once"
    return Peer("plain", "torch", torch.__version__, plain, True, note)


def load_compiled() -> Peer:
    # fullgraph turns an exhausted recompile limit into an error. Without it, eager code would silently be timed.
    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    note = "the same lines through inductor; needs a C++ compiler, and the first call of each shape compiles"
    return Peer("torch.compile", "torch", torch.__version__, compiled, True, note)


def load_trl_fused() -> Peer:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE  # the tile width of its trainers

    def trl_fused(hidden: Tensor, head: Tensor, token_ids: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Calls the function behind add_fused_lm_head in GRPOTrainer, which always requests the entropy as well."""
        outputs = ("log_probs", "entropy") if entropy else ("log_probs",)
        logp_N, entropy_N, *_ = ChunkedLogProbFunction.apply(
            hidden, head, None, token_ids, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )
        return logp_N, entropy_N

    note = "eager torch in place of Triton; backward recomputes the logits and multiplies in float32"
    return Peer("TRL fused head", "trl", importlib.metadata.version("trl"), trl_fused, True, note)


def load_trl_selective() -> Peer:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    def trl_selective(
        hidden: Tensor, head: Tensor, token_ids: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Calls it with [N, V]. It loops over the first dimension, so [1, N, V] or eight sequences would be slower."""
        logits_NV = hidden @ head.T
        if entropy:
            return selective_log_softmax_and_entropy(logits_NV, token_ids)
        return selective_log_softmax(logits_NV, token_ids), None

    note = "keeps all logits in hidden's dtype and rounds its log-probabilities and entropies to it"
    return Peer("TRL selective_log_softmax", "trl", importlib.metadata.version("trl"), trl_selective, True, note)


def load_liger_chunked() -> Peer:
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    def liger_chunked(
        hidden: Tensor, head: Tensor, token_ids: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the log-probs inside LigerFusedLinearGRPOLoss, without its loss. It does not offer the entropy."""
        return LigerFusedLinearPPOBase.chunk_forward(hidden[None], head, token_ids[None])[0], None

    note = "eager torch, as on a GPU; backward recomputes the logits and multiplies in float32; no entropy"
    version = importlib.metadata.version("liger-kernel")
    return Peer("Liger chunked GRPO", "liger-kernel", version, liger_chunked, False, note)


def load_liger_cross_entropy() -> Peer:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction  # imports Triton, which needs no GPU

    def liger_cross_entropy(
        hidden: Tensor, head: Tensor, token_ids: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Passes verl's arguments: temperature 1, ignore_index -100, one tile per cluster."""
        found = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, head, token_ids, 1.0, -100, 1, entropy)
        nll_N, entropy_N = found if entropy else (found, None)
        return -nll_N, entropy_N

    note = "off Hopper verl's formulas: entropy (in hidden's dtype) and the head's gradient always computed"
    version = importlib.metadata.version("liger-kernel")
    return Peer("Liger fused cross-entropy", "liger-kernel", version, liger_cross_entropy, True, note)


def load_verl() -> Peer:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    module = FusedLinearForPPO(impl_backend="torch")

    def verl(hidden: Tensor, head: Tensor, token_ids: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Calls the default backend of verl's fused kernels, which always computes the entropy."""
        logp_N, entropy_N = module(hidden, head, token_ids)
        return logp_N, entropy_N if entropy else None

    note = "eager torch, 512 tokens at a time; entropy (in hidden's dtype) and the head's gradient always computed"
    return Peer("verl FusedLinearForPPO", "verl", importlib.metadata.version("verl"), verl, True, note)


def load_all() -> dict[str, Peer]:
    """Returns every peer whose package can be imported, by name. Reports the others on stderr."""
    found: dict[str, Peer] = {}
    loaders: dict[str, Callable[[], Peer]] = {
        "plain": load_plain,
        "compiled": load_compiled,
        "trl_fused": load_trl_fused,
        "trl_selective": load_trl_selective,
        "liger_chunked": load_liger_chunked,
        "liger_cross_entropy": load_liger_cross_entropy,
        "verl": load_verl,
    }
    for name, load in loaders.items():
        try:
            found[name] = load()
        except ImportError as error:
            print(f"Skipping peer {name}: {error}", file=sys.stderr)
    return found


PEERS: dict[str, Peer] = load_all()


def truth(hidden: Tensor, head: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies in the inputs' dtype, here float64."""
    logp_NV = torch.log_softmax(hidden @ head.T, -1)
    return logp_NV.gather(-1, token_ids[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def gradients(values: list[Tensor], weights: list[Tensor], inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Returns the gradients of Σ weight · value in hidden and head as float64; zeros if no gradient flows."""
    total = torch.stack([(weight * value.double()).sum() for weight, value in zip(weights, values, strict=True)]).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x).double() if g is None else g.double() for g, x in zip(found, inputs, strict=True)]


def errors(peer: Peer, hidden: Tensor, head: Tensor, token_ids: Tensor) -> dict[str, float]:
    """Returns the largest error of each value (absolute) and gradient (relative to its largest entry), vs. float64."""
    exact = (hidden.double().requires_grad_(), head.double().requires_grad_())
    inputs = (hidden.clone().requires_grad_(), head.clone().requires_grad_())
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, hidden.shape[0], generator=generator, dtype=torch.float64)
    table: dict[str, float] = {}
    for case, chosen in {"log-prob": [0], "entropy": [1], "both": [0, 1]}.items():
        if case != "log-prob" and not peer.gives_entropy:
            continue
        found = peer.function(*inputs, token_ids, entropy=case != "log-prob")
        got = [x for x in (found[i] for i in chosen) if x is not None]
        right = [truth(*exact, token_ids)[i] for i in chosen]
        if len(chosen) == 1:
            table[case] = (got[0].double() - right[0]).abs().max().item()
        weight = [weights[i] for i in chosen]
        pairs = zip(gradients(got, weight, inputs), gradients(right, weight, exact), strict=True)
        table[f"{case} gradient"] = max(((g - r).abs().max() / r.abs().max()).item() for g, r in pairs)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=500)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(getattr(torch, args.dtype))
    head = (2 * torch.randn(args.vocab, args.hidden, generator=generator) / args.hidden**0.5).to(hidden.dtype)
    token_ids = torch.randint(args.vocab, (args.tokens,), generator=generator)

    columns = ("log-prob", "log-prob gradient", "entropy", "entropy gradient", "both gradient")
    print(f"N = {args.tokens:,}, H = {args.hidden:,}, V = {args.vocab:,}, {args.dtype}, torch {torch.__version__}, CPU")
    print("Largest errors against float64; gradients relative to their largest entry, the worse of hidden and head\n")
    print(f"| peer | version | {' | '.join(columns)} | on a CPU |")
    print(f"|{'---|' * (len(columns) + 3)}")
    for peer in PEERS.values():
        table = errors(peer, hidden, head, token_ids)
        cells = " | ".join(f"{table[column]:.1e}" if column in table else "–" for column in columns)
        print(f"| {peer.name} | {peer.version} | {cells} | {peer.note} |")


if __name__ == "__main__":
    main()
