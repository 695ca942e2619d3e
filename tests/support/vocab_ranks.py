"""What each process of the sharded-head tests does; a module of its own, so that new processes can import it."""

import os

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import trustrl
from support.devices import BACKEND, DEVICE, take
from trustrl.core.token_logprobs import AnchorStates, VocabShard
from trustrl.kernels.kept_logprobs import kept_logprobs

N, D, V, K = 13, 6, 53, 5
CASES = {
    "sampled token only": {},
    "ids and entropy": {"gather": True, "entropy": True},
    "everything": {"gather": True, "entropy": True, "top_k": 4, "bias": True, "softcap": 3.0, "against": True},
    "frozen head": {"gather": True, "entropy": "detached", "frozen": True, "top_k": 2},
}


def world():
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    token = torch.randint(0, V, (N,), generator=g)
    token[3] = -1
    ids = torch.randint(-1, V, (N, K), generator=g)
    ids[:, 1] = ids[:, 0]
    ids[0] = torch.arange(K)  # one row with every given id on the first rank
    drawn = normal(N, D), normal(V, D), normal(V), token, ids, normal(N, D), normal(V, D)
    *rest, other, other_head = (x.to(DEVICE) for x in drawn)
    return *rest, (other, other_head)


def results(case, part, shard, impl="chunked", dtype=torch.float64):
    """Outputs and gradients with the rows `part` of the head."""
    hidden, head, bias, token, ids, other = world()
    hidden, head, bias, other = hidden.to(dtype), head.to(dtype), bias.to(dtype), [x.to(dtype) for x in other]
    leaves = [hidden.requires_grad_(), head[part].clone(), bias[part].clone()]
    for leaf in leaves[1:]:
        leaf.requires_grad_(not case.get("frozen"))
    out = trustrl.token_logprobs(
        leaves[0], leaves[1], token, gather_ids=ids if case.get("gather") else None, entropy=case.get("entropy", False),
        top_k=case.get("top_k", 0), bias=leaves[2] if case.get("bias") else None, softcap=case.get("softcap"),
        against=AnchorStates(other[0], other[1][part]) if case.get("against") else None,
        temperature=0.8, shard=shard, block_rows=5, block_vocab=7, impl=impl,
    )  # fmt: skip
    found = {n: x for n, x in out._asdict().items() if isinstance(x, torch.Tensor) and n != "logp_error"}
    if out.topk is not None:
        found |= {"top logp": out.topk.logp, "top ids": out.topk.ids}
    g = torch.Generator().manual_seed(1)
    total = torch.zeros((), device=DEVICE)
    for x in found.values():
        if x.is_floating_point():
            factors = torch.randn(x.shape, generator=g).to(DEVICE)
            total = total + (torch.where(x.isfinite(), x, 0.0) * factors).sum()
    total.backward()
    grads = {n: x.grad for n, x in zip(("d hidden", "d head", "d bias"), leaves, strict=True) if x.grad is not None}
    return {n: x.detach() for n, x in found.items()} | grads


class Payloads(TorchDispatchMode):
    """Bytes handed to each collective."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            # The largest tensor among the arguments that is not a list of outputs: what this rank sends.
            sent = args[1] if "allgather" in str(func) else args[0]
            tensors = sent if isinstance(sent, (list, tuple)) else [sent]
            self.sizes.append((str(func), sum(x.numel() * x.element_size() for x in tensors)))
        return func(*args, **(kwargs or {}))


def start(rank, ranks, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    take(rank)
    dist.init_process_group(BACKEND, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def edges(ranks):
    """Uneven parts: the first rank holds fewer words than the others."""
    return [0, *(5 + (V - 5) * r // (ranks - 1) for r in range(ranks))]


def agree(rank, ranks, folder):
    start(rank, ranks, folder)
    lo, hi = edges(ranks)[rank : rank + 2]
    shard = VocabShard(None, lo)
    for name, case in CASES.items():
        whole = results(case, slice(0, V), None)
        mine = results(case, slice(lo, hi), shard)
        assert whole.keys() == mine.keys(), name
        for key, want in whole.items():
            want = want[lo:hi] if key in ("d head", "d bias") else want
            torch.testing.assert_close(mine[key], want, msg=lambda text, at=(name, key): f"{at}: {text}")
    dist.destroy_process_group()


def agree_in_triton(rank, ranks, folder):
    """The Triton pass on each rank's part, in the interpreter, against the chunked pass on the whole head."""
    start(rank, ranks, folder)
    lo, hi = edges(ranks)[rank : rank + 2]
    for name, case in CASES.items():
        whole = results(case, slice(0, V), None)
        mine = results(case, slice(lo, hi), VocabShard(None, lo), "triton", torch.float32)
        assert whole.keys() == mine.keys(), name
        for key, want in whole.items():
            want = want[lo:hi] if key in ("d head", "d bias") else want
            text = lambda text, at=(name, key): f"{at}: {text}"  # noqa: E731
            torch.testing.assert_close(mine[key], want.to(mine[key].dtype), rtol=1e-4, atol=1e-4, msg=text)
    dist.destroy_process_group()


def kept_results(part, shard):
    """Log-probs inside kept ids, and their gradients, with the rows `part` of the head."""
    hidden, head, bias, token, ids, _ = world()
    ids = torch.cat([token.unsqueeze(-1), ids[:, 1:]], -1)  # different ones, as kept ids are
    ids[5] = -1
    leaves = [x.clone().requires_grad_() for x in (hidden, head[part], bias[part])]
    logp = kept_logprobs(leaves[0], leaves[1], ids, temperature=0.8, bias=leaves[2], softcap=3.0, shard=shard)
    g = torch.Generator().manual_seed(1)
    (torch.where(ids >= 0, logp, 0.0) * torch.randn(ids.shape, generator=g).to(DEVICE)).sum().backward()
    return {"logp": logp.detach()} | {f"d {n}": x.grad for n, x in zip(("hidden", "head", "bias"), leaves, strict=True)}


def kept_agree(rank, ranks, folder):
    start(rank, ranks, folder)
    lo, hi = edges(ranks)[rank : rank + 2]
    whole = kept_results(slice(0, V), None)
    with Payloads() as payloads:
        mine = kept_results(slice(lo, hi), VocabShard(None, lo))
    for key, want in whole.items():
        torch.testing.assert_close(mine[key], want[lo:hi] if key in ("d head", "d bias") else want)
    num_ids = int((whole["logp"] > -torch.inf).sum())
    assert [size for _, size in payloads.sizes] == [8 * num_ids, 8 * N * D]  # in float64: forward, backward
    dist.destroy_process_group()


def count(rank, ranks, folder):
    from torch.distributed.tensor.debug import CommDebugMode  # here: it imports the compiler, which takes seconds

    start(rank, ranks, folder)
    lo, hi = edges(ranks)[rank : rank + 2]
    hidden, head, _, token, ids, _ = (
        x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in world()
    )
    hidden.requires_grad_()
    part = head[lo:hi].clone().requires_grad_()
    with CommDebugMode() as collectives, Payloads() as payloads:
        out = trustrl.token_logprobs(hidden, part, token, gather_ids=ids, entropy=True, shard=VocabShard(None, lo))
        forward = list(payloads.sizes)
        (out.logp + out.tail_logp + out.entropy).sum().backward()
        backward = payloads.sizes[len(forward) :]
    assert collectives.get_total_counts() == 2
    assert [size for _, size in forward] == [4 * (K + 3) * N], forward  # one all-gather, K + 3 numbers a token
    assert [size for _, size in backward] == [4 * N * D], backward  # the hidden states' gradient
    dist.destroy_process_group()


def control(rank, ranks, folder):
    start(rank, ranks, folder)
    logits = torch.zeros(N, V // 2, device=DEVICE)
    with Payloads() as payloads:
        dist.all_gather_into_tensor(logits.new_empty(2 * N, V // 2), logits)
    assert [size for _, size in payloads.sizes] == [4 * N * (V // 2)]
    dist.destroy_process_group()
