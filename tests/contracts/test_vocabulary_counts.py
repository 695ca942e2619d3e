"""The pass over the vocabulary never waits for the device, launches a bounded number of kernels per tile, and gives the
same results as the shortcuts of a CPU."""

import pytest
import torch

import trustrl
from support.device_counts import Counts, as_on_an_accelerator, counted
from trustrl.core.token_logprobs import AnchorStates

N, D, V, K = 24, 16, 160, 5
TILE = 32  # five tiles, unless a test says otherwise

SETTINGS = {
    "sampled token": {},
    "ids": {"gather": True},
    "entropy": {"gather": True, "entropy": True},
    "entropy without gradient": {"gather": True, "entropy": "detached"},
    "top_k": {"gather": True, "top_k": 4},
    "bias, softcap, temperature": {"gather": True, "entropy": True, "bias": True, "softcap": 3.0, "temperature": True},
    "against": {"gather": True, "against": True},
}


def world(dtype=torch.float32, ignored=True):
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, D, generator=g, dtype=torch.float64).to(dtype) for rows in (N, V))
    bias, temperature = 0.3 * torch.randn(V, generator=g), 0.5 + torch.rand(N, generator=g)
    token = torch.randint(0, V, (N,), generator=g)
    if ignored:
        token[::5] = -100
    ids = torch.randint(-1, V, (N, K), generator=g)
    weight = torch.randn(N, generator=g)
    weight[1::4] = 0.0  # rows without a gradient
    return hidden, head, bias.to(dtype), temperature, token, ids, weight


def step(settings, frozen, dtype=torch.float32, block_vocab=TILE, **cuts):
    """(outputs, gradients) of one pass, as flat dictionaries. Makes its inputs; see `run` for what is counted."""
    return run(world(dtype), settings, frozen, block_vocab=block_vocab, **cuts)


def run(tensors, settings, frozen, **cuts):
    hidden, head, bias, temperature, token, ids, weight = tensors
    hidden, head, bias = (x.detach().requires_grad_(not frozen or x is hidden) for x in (hidden, head, bias))
    out = trustrl.token_logprobs(
        hidden, head, token, gather_ids=ids if settings.get("gather") else None, top_k=settings.get("top_k", 0),
        entropy=settings.get("entropy", False), temperature=temperature if settings.get("temperature") else 0.7,
        bias=bias if settings.get("bias") else None, softcap=settings.get("softcap"),
        against=AnchorStates(hidden.detach() + 0.1, head.detach()) if settings.get("against") else None, **cuts,
    )  # fmt: skip
    found = {name: x for name, x in out._asdict().items() if x is not None and name != "topk"}
    if out.topk is not None:
        found |= {f"top {name}": x for name, x in out.topk._asdict().items()}
    terms = [out.logp, out.tail_logp, out.entropy if settings.get("entropy") is True else None]
    terms += [] if out.topk is None else [torch.where(out.topk.ids >= 0, out.topk.logp, 0.0).sum(-1)]
    sum((weight * x).sum() for x in terms if x is not None).backward()
    leaves = {"d hidden": hidden, "d head": head, "d bias": bias}
    return {**found, **{name: x.grad for name, x in leaves.items() if x.grad is not None}}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_nothing_waits_for_the_device(settings, frozen):
    tensors = world()
    with counted() as counts:
        run(tensors, settings, frozen, block_vocab=TILE, block_rows=N)
    assert not counts.waits, str(counts)
    assert not counts.copies, str(counts)
    assert counts.kernels["aten::mm.out"] >= V // TILE


def test_a_cpu_takes_shortcuts_that_would_wait_elsewhere():
    """Without this, a counter that sees nothing would pass."""
    with Counts() as counts:
        step(SETTINGS["top_k"], frozen=False)
    assert sum(counts.waits.values()) > V // TILE


@pytest.mark.parametrize(
    ("name", "frozen", "most"),
    [
        ("sampled token", False, 60), ("ids", False, 60), ("entropy", False, 60), ("ids", True, 40),
        ("top_k", False, 115), ("bias, softcap, temperature", False, 80), ("against", False, 129),
    ],
)  # fmt: skip
def test_kernels_per_tile_forward_and_backward(name, frozen, most):
    """Counted as ATen operations, uncompiled: twice the tiles cost at most this many more for each tile."""
    launched = []
    for tile in (TILE, TILE // 2):
        tensors = world()
        with counted() as counts:
            run(tensors, SETTINGS[name], frozen, block_vocab=tile, block_rows=N)
        launched.append(sum(counts.kernels.values()))
    per_tile = (launched[1] - launched[0]) / (V // TILE)
    assert 0 < per_tile <= most, launched


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_accelerator_gets_what_a_cpu_and_the_definition_give(settings, frozen):
    cuts = {"block_rows": 10, "block_vocab": 48}  # a narrower last tile, a shorter last block
    looking = step(settings, frozen, torch.float64, **cuts)
    with as_on_an_accelerator():
        blind = step(settings, frozen, torch.float64, **cuts)
    truth = step(settings, frozen, torch.float64, impl="reference")
    assert blind.keys() == looking.keys()
    for name, got in blind.items():
        torch.testing.assert_close(got, looking[name], rtol=1e-12, atol=1e-12, msg=name)
        if name in truth:
            torch.testing.assert_close(got, truth[name], rtol=1e-9, atol=1e-9, msg=name)
    ignored = world()[4] < 0
    without = ignored | (world()[6] == 0)
    assert (blind["logp"][ignored] == 0).all()
    assert (blind["d hidden"][without] == 0).all()
    assert (blind["d hidden"][~without] != 0).any(-1).all()
