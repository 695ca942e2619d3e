"""The Triton pass under Triton's interpreter: no further from float64 truth than plain code in the same dtype.

Triton reads TRITON_INTERPRET when it is first imported, and everything it compiles afterwards is interpreted. The checks
therefore run in a process of their own: `TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py`, or through the one
test here that starts it.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trustrl
from support import vocab_ranks
from support.device_counts import counted
from trustrl.core.token_logprobs import AnchorStates
from trustrl.kernels.pass_inputs import PassInputs

pytest.importorskip("triton", reason="triton is not installed; `pip install triton==3.7.1` goes with torch 2.13")

pytestmark = [
    pytest.mark.compiled,
    # The interpreter computes with numpy what a kernel computes and then discards.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_everything_here_under_the_interpreter")

if INTERPRETED:
    from trustrl.kernels import triton_divergence, triton_launch, triton_pass


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_everything_here_under_the_interpreter():
    # pytest's own variables are left out: the inner run is no part of this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    files = [__file__, str(Path(__file__).with_name("test_vocabulary_impl.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


# The interpreter truncates float32 to bfloat16 where a GPU rounds to nearest: one unit in the last place, 2⁻⁷.
ULP = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

SHAPES = {  # N, D, V, C
    "one of everything": (1, 1, 1, 1),
    "two columns": (2, 3, 2, 1),
    "sampled token only": (33, 16, 130, 1),
    "ragged": (19, 40, 301, 21),
    "whole tiles": (32, 32, 256, 21),
    "more ids than columns": (5, 8, 23, 65),
    "wide": (20, 24, 700, 65),
}

SETTINGS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 4.0},
    "temperature": {"temperature": True},
    "everything": {"bias": True, "softcap": 4.0, "temperature": True},
}


def make(n, d, v, c, dtype=torch.float32, *, bias=False, softcap=None, temperature=False, seed=0):
    """What `forward` takes, as a dictionary, and random gradients of what it returns."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    ids = torch.randint(0, v, (n, c), generator=g)
    if c > 2:
        ids[:, 2] = ids[:, 0]  # the sampled token among the others
    if c >= v:
        ids[0] = torch.arange(c).flip(0) % v  # a row with nothing left
    first = torch.tensor([[ids[i, :j].ne(ids[i, j]).all() for j in range(c)] for i in range(n)])
    # Some ids count nowhere, and stay in the rest.
    counts = first & ((torch.rand(n, c, generator=g) < 0.9) | (torch.arange(n) % 2 == 0).unsqueeze(1))
    inputs = {
        "hidden": draw(n, d).to(dtype),
        "head": (2 / math.sqrt(d) * draw(v, d)).to(dtype),
        "bias": draw(v).to(dtype) if bias else None,
        "ids": ids,
        "counts": counts,
        "scale": (1 / (0.5 + torch.rand(n, generator=g)) if temperature else torch.ones(n)),
        "softcap": softcap,
    }
    return inputs, (draw(n, c), draw(n), draw(n))


def definition(hidden, head, bias, ids, counts, scale, softcap, *, wide):
    """(logits at the ids, rest, inner, largest) with every logit in memory; products in the inputs' dtype, then `wide`."""
    raw = (hidden @ head.T).to(wide)
    raw = raw if bias is None else raw + bias.to(wide)
    z = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    z = z * scale.to(wide).unsqueeze(1)
    left = torch.ones_like(z, dtype=torch.bool)
    for i, j in counts.nonzero().tolist():
        left[i, ids[i, j]] = False
    live = left.any(1)
    # Rows without a cell are given one, and taken out of the result, so that autograd meets no NaN.
    open_ = left | ~live.unsqueeze(1)
    rest = torch.logsumexp(z.masked_fill(~open_, -torch.inf), 1)
    log_q = torch.where(open_, z - rest.unsqueeze(1), 0.0)
    inner = -torch.where(open_, log_q.exp() * log_q, 0.0).sum(1)
    largest = torch.where(left, raw.abs(), 0.0).amax(1)
    return z.gather(1, ids), torch.where(live, rest, -torch.inf), torch.where(live, inner, 0.0), largest


def by_definition(inputs, upstream, dtype):
    """Values and gradients by autograd, from inputs cast to `dtype`."""
    names = [name for name in ("hidden", "head", "bias") if inputs[name] is not None]
    leaves = {name: inputs[name].detach().to(dtype, copy=True).requires_grad_() for name in names}
    wide = torch.promote_types(dtype, torch.float32)
    known, rest, inner, largest = definition(**{**inputs, **leaves}, wide=wide)
    total = sum(
        (torch.where(x.isfinite(), x, 0.0) * up.to(wide)).sum()
        for x, up in zip((known, rest, inner), upstream, strict=True)
    )
    grads = torch.autograd.grad(total, list(leaves.values()))
    found = {"known": known, "rest": rest, "inner": inner, "largest": largest}
    return {k: x.detach() for k, x in found.items()} | {f"d {n}": x for n, x in zip(names, grads, strict=True)}


def by_triton(inputs, upstream, wants=(True, True, True), live=None):
    given = list(inputs.values())
    known, _, rest, inner, largest = triton_pass.forward(*given, live)
    grads = triton_pass.backward(*given, rest, inner, *(up.float() for up in upstream), wants)
    named = {f"d {n}": x for n, x in zip(("hidden", "head", "bias"), grads, strict=True) if x is not None}
    return {"known": known, "rest": rest, "inner": inner, "largest": largest} | named


def assert_no_further_from_the_truth_than_plain_code(inputs, upstream, dtype, found=None):
    truth = by_definition(inputs, upstream, torch.float64)
    plain = by_definition(inputs, upstream, dtype)
    found = by_triton(inputs, upstream) if found is None else found
    assert found.keys() == truth.keys()
    for name, t in truth.items():
        f, p = found[name], plain[name]
        assert f.dtype == (dtype if name.startswith("d ") else torch.float32), name
        assert torch.equal(f == -torch.inf, t == -torch.inf), name
        t, p, f = (x.double().masked_fill(t == -torch.inf, 0.0) for x in (t, p, f))
        allowed = (t - p).abs().max() + ULP[dtype] * t.abs().max().clamp(min=1e-3)
        worst = (t - f).abs().max()
        assert worst <= allowed, f"{name}: error {worst:.2e}, plain code and rounding make {allowed:.2e}"


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that every shape has several of each: rows, columns, splits, groups, slices of the buffer."""
    launch = {"rows": 16, "columns": 64, "depth": 32, "min_tiles": 2, "row_blocks_per_group": 2}
    for table in (triton_launch.LAUNCHES, triton_launch.TOP_K_LAUNCHES, triton_launch.DIVERGENCE_LAUNCHES):
        for at, usual in table.items():
            monkeypatch.setitem(table, at, usual._replace(**launch))
    monkeypatch.setattr(triton_pass, "BUFFER_BYTES", 20_000)
    monkeypatch.setitem(triton_launch.ID_LAUNCH, "DEPTH", 16)
    monkeypatch.setattr(triton_pass, "SLOTS", 8)


def test_the_definition_agrees_with_torch_distributions():
    """The anchor: without it, `* scale` → `/ scale` in the definition and in the kernel would go unseen."""
    inputs, _ = make(6, 4, 30, 5, torch.float64, bias=True, softcap=3.0, temperature=True)
    _, rest, inner, largest = definition(**inputs, wide=torch.float64)
    raw = inputs["hidden"] @ inputs["head"].T + inputs["bias"]
    logits = 3.0 * torch.tanh(raw / 3.0) * inputs["scale"].unsqueeze(1)
    for i in range(6):
        out = {int(j) for j, counts in zip(inputs["ids"][i], inputs["counts"][i], strict=True) if counts}
        left = [j for j in range(30) if j not in out]
        torch.testing.assert_close(inner[i], torch.distributions.Categorical(logits=logits[i, left]).entropy())
        torch.testing.assert_close(rest[i].exp(), logits[i, left].exp().sum())
        torch.testing.assert_close(largest[i], raw[i, left].abs().max())


@interpreted
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("settings", ["plain", "everything"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, settings, dtype, small_blocks):
    inputs, upstream = make(*SHAPES[shape], dtype, **SETTINGS[settings])
    assert_no_further_from_the_truth_than_plain_code(inputs, upstream, dtype)


@interpreted
@pytest.mark.parametrize("settings", SETTINGS)
def test_each_setting_by_itself(settings, small_blocks):
    inputs, upstream = make(*SHAPES["ragged"], torch.float32, **SETTINGS[settings], seed=1)
    assert_no_further_from_the_truth_than_plain_code(inputs, upstream, torch.float32)


@interpreted
@pytest.mark.parametrize("dtype", ULP, ids=str)
def test_as_it_is_launched(dtype):
    """No smaller blocks: the launch table itself, over several splits."""
    inputs, upstream = make(64, 128, 2000, 21, dtype, **SETTINGS["everything"])
    assert_no_further_from_the_truth_than_plain_code(inputs, upstream, dtype)


def with_top_k(inputs, upstream, top_k):
    """Results of the pass with `top_k`, and the inputs with the found ids among the counted ones."""
    given, (d_known, d_rest, d_inner) = list(inputs.values()), upstream
    known, found, rest, inner, largest = triton_pass.forward(*given, None, top_k)
    ids = torch.cat([inputs["ids"], found.clamp(min=0)], 1)
    more = inputs | {"ids": ids, "counts": torch.cat([inputs["counts"], found >= 0], 1)}
    extra = torch.randn(found.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    upstream = torch.cat([d_known, torch.where(found >= 0, extra, 0.0)], 1), d_rest, d_inner
    grads = triton_pass.backward(*more.values(), rest, inner, *(up.float() for up in upstream), (True, True, True))
    results = {"known": known, "rest": rest, "inner": inner, "largest": largest}
    named = {f"d {n}": x for n, x in zip(("hidden", "head", "bias"), grads, strict=True) if x is not None}
    return results | named, more, upstream, found


TOP_K = {
    "two columns": ("two columns", 1, "plain", torch.float32),
    "fewer columns than k": ("more ids than columns", 20, "plain", torch.float32),
    "the largest": ("sampled token only", 1, "everything", torch.float32),
    "several slots": ("ragged", 20, "everything", torch.float32),
    "bfloat16": ("ragged", 5, "everything", torch.bfloat16),
    "float16": ("ragged", 5, "plain", torch.float16),
}


@interpreted
@pytest.mark.parametrize("case", TOP_K)
def test_top_k(case, small_blocks):
    """What is found is the largest that was not given; it leaves the rest, and everything else stays in it."""
    shape, top_k, settings, dtype = TOP_K[case]
    inputs, upstream = make(*SHAPES[shape], dtype, **SETTINGS[settings])
    results, more, upstream, found = with_top_k(inputs, upstream, top_k)
    wide = {n: x.double() if n in ("hidden", "head") else x for n, x in more.items()}
    everything = torch.arange(SHAPES[shape][2]).repeat(len(found), 1)
    logits = definition(**wide | {"ids": everything, "counts": torch.zeros(0, 0)}, wide=torch.float64)[0]
    for i, ids in enumerate(found):
        given = set(inputs["ids"][i][inputs["counts"][i]].tolist())
        others = [j for j in range(SHAPES[shape][2]) if j not in given]
        best = logits[i, others].topk(min(top_k, len(others))).values
        present = ids[ids >= 0]
        assert len(set(present.tolist()) - given) == len(present) == len(best)
        torch.testing.assert_close(logits[i, present], best, rtol=0, atol=1e-5)
    descending = results["known"][:, -top_k:].masked_fill(found < 0, -torch.inf)
    assert (descending.diff(dim=1).nan_to_num(0.0) <= 0).all()
    # Empty columns hold 0; the definition reads id 0 there.
    results["known"][:, -top_k:] = torch.where(found >= 0, results["known"][:, -top_k:], logits[:, :1].float())
    assert_no_further_from_the_truth_than_plain_code(more, upstream, dtype, results)


@interpreted
def test_top_k_does_not_depend_on_the_splits(small_blocks, monkeypatch):
    inputs, upstream = make(*SHAPES["ragged"], **SETTINGS["everything"])
    results = []
    for programs in (1, 1000):
        monkeypatch.setattr(triton_launch, "PROGRAMS", programs)
        results.append(with_top_k(inputs, upstream, 7))
    for one, _, _, found in results[1:]:
        assert torch.equal(found, results[0][3])
        for name, x in one.items():
            torch.testing.assert_close(x, results[0][0][name], rtol=2e-5, atol=2e-6, msg=name)


@interpreted
@pytest.mark.parametrize(
    "dead",
    [[], [3, 4, 5, 18], list(range(18)), list(range(19))],
    ids=["none", "some", "all but one", "all"],
)
def test_rows_that_are_not_live_hold_zeros_and_change_no_other(dead, small_blocks):
    inputs, (d_known, d_rest, d_inner) = make(*SHAPES["ragged"], **SETTINGS["everything"])
    live = torch.ones(19, dtype=torch.bool)
    live[dead] = False
    for up in (d_known, d_rest, d_inner):
        up[dead] = 0.0
    whole = by_triton(inputs, (d_known, d_rest, d_inner))
    inputs["hidden"][dead] = torch.nan
    found = by_triton(inputs, (d_known, d_rest, d_inner), live=live)
    for name in ("known", "rest", "inner", "largest", "d hidden"):
        assert torch.equal(found[name][live], whole[name][live]), name
        assert (found[name][dead] == 0).all(), name
    for name in ("d head", "d bias"):
        assert torch.equal(found[name], whole[name]), name
    top = triton_pass.forward(*inputs.values(), live, 3)
    assert (top.found_NK[dead] == -1).all()
    assert (top.found_NK[live] >= 0).all()


@interpreted
@pytest.mark.parametrize("known", [23, 20], ids=["every column known", "the others closed by the bias"])
def test_rows_with_nothing_left(known, small_blocks):
    """Their gradients of rest and inner may be anything, and change nothing."""
    inputs, (d_known, d_rest, d_inner) = make(*SHAPES["more ids than columns"], bias=True)
    inputs["bias"][known:] = -torch.inf
    inputs["ids"][0] = torch.arange(65) % known
    inputs["counts"][0] = torch.arange(65) < known
    d_rest[0] = d_inner[0] = torch.nan
    found = by_triton(inputs, (d_known, d_rest, d_inner))
    assert found["rest"][0] == -torch.inf
    assert found["inner"][0] == found["largest"][0] == 0
    assert found["rest"][1:].isfinite().any()
    assert all(found[name].isfinite().all() for name in ("d hidden", "d head", "d bias"))


@interpreted
def test_gradients_nobody_wants_are_not_made(small_blocks):
    inputs, upstream = make(*SHAPES["ragged"], bias=True)
    everything = by_triton(inputs, upstream)
    for wants, name in (
        ((True, False, False), "hidden"),
        ((False, True, False), "head"),
        ((False, False, True), "bias"),
    ):
        found = by_triton(inputs, upstream, wants)
        assert [key for key in found if key.startswith("d ")] == [f"d {name}"]
        assert torch.equal(found[f"d {name}"], everything[f"d {name}"])


@interpreted
def test_opposite_gradients_of_one_id_cancel_exactly(small_blocks):
    """The sampled token is usually one of the K ids as well; rounding each to bfloat16 would leave a remainder."""
    inputs, (d_known, d_rest, d_inner) = make(*SHAPES["ragged"], torch.bfloat16)
    inputs["ids"][:, 1] = inputs["ids"][:, 0]
    inputs["counts"][:, 1] = False
    d_known = torch.zeros_like(d_known)
    quiet = by_triton(inputs, (d_known.clone(), d_rest, d_inner))
    d_known[:, 0], d_known[:, 1] = 1.2345, -1.2345
    assert torch.equal(by_triton(inputs, (d_known, d_rest, d_inner))["d head"], quiet["d head"])


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", ULP, ids=str)
def test_a_known_logit_far_above_the_rest(dtype, small_blocks):
    """exp(known − rest) overflows; nothing of it may reach a gradient."""
    inputs, upstream = make(*SHAPES["ragged"], dtype, bias=True)
    inputs["bias"] = torch.zeros_like(inputs["bias"])
    inputs["bias"][7] = 300.0
    inputs["ids"][:, 0], inputs["counts"][:, 0] = 7, True
    inputs["counts"][:, 1:] &= inputs["ids"][:, 1:] != 7
    assert_no_further_from_the_truth_than_plain_code(inputs, upstream, dtype)


@interpreted
def test_a_bias_of_minus_infinity_takes_the_column_out(small_blocks):
    inputs, upstream = make(*SHAPES["ragged"], bias=True)
    inputs["ids"] = inputs["ids"] % 200
    inputs["bias"][200:] = -torch.inf
    found = by_triton(inputs, upstream)
    fewer = by_triton(inputs | {"head": inputs["head"][:200], "bias": inputs["bias"][:200]}, upstream)
    for name in ("rest", "inner", "largest", "d hidden"):
        torch.testing.assert_close(found[name], fewer[name], msg=name)
    assert (found["d head"][200:] == 0).all()


@interpreted
def test_a_nan_is_seen_in_its_row_and_in_no_other(small_blocks):
    inputs, upstream = make(*SHAPES["ragged"])
    inputs["hidden"][3, 5] = torch.nan
    found = by_triton(inputs, upstream)
    others = torch.arange(19) != 3
    for name in ("rest", "inner", "d hidden"):
        assert found[name][3].isnan().all(), name
        assert found[name][others].isfinite().all(), name


@interpreted
def test_no_tokens(small_blocks):
    inputs, upstream = make(3, 8, 50, 4, bias=True)
    none = {name: x[:0] if name in ("hidden", "ids", "counts", "scale") else x for name, x in inputs.items()}
    found = by_triton(none, [x[:0] for x in upstream])
    assert found["rest"].shape == (0,)
    assert (found["d head"] == 0).all()
    assert (found["d bias"] == 0).all()


@interpreted
def test_tensors_with_gaps_and_narrow_ids(small_blocks):
    inputs, upstream = make(*SHAPES["ragged"], **SETTINGS["everything"])
    with_gaps = lambda x: x.repeat_interleave(2, -1)[..., ::2]  # noqa: E731
    gappy = {name: with_gaps(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    gappy["ids"] = inputs["ids"].T.int().contiguous().T
    dense, found = by_triton(inputs, upstream), by_triton(gappy, [with_gaps(x) for x in upstream])
    for name in dense:
        torch.testing.assert_close(found[name], dense[name], rtol=1e-6, atol=1e-6, msg=name)


@interpreted
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
def test_dtypes_it_does_not_know(dtypes):
    inputs, _ = make(*SHAPES["two columns"])
    for name, dtype in zip(("hidden", "head"), dtypes, strict=True):
        inputs[name] = inputs[name].to(dtype)
    with pytest.raises(TypeError, match="must share one of bfloat16, float16 and float32, got"):
        triton_pass.forward(*inputs.values())


def logits_in_float64(side, scale, softcap):
    raw = side["hidden"].double() @ side["head"].double().T
    raw = raw if side["bias"] is None else raw + side["bias"].double()
    raw = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    return raw * scale.double().unsqueeze(1)


def inputs_of_a_pass(inputs, dtype):
    return PassInputs(*inputs.values(), product_dtype=dtype, block_rows=8, block_vocab=50)


@interpreted
@pytest.mark.parametrize("settings", ["plain", "everything"])
@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("distance", [1.0, 1e-3], ids=["another policy", "almost the same policy"])
def test_divergences(distance, dtype, settings, small_blocks):
    """Σ|m − p| and KL(m‖p) against float64, with another hidden size on the anchor's side and one row not live."""
    inputs, _ = make(*SHAPES["ragged"], dtype, **SETTINGS[settings])
    other, _ = make(19, 24, 301, 21, dtype, **SETTINGS[settings], seed=3)
    if distance < 1:
        other = {**inputs, "hidden": (inputs["hidden"].float() * (1 + distance)).to(dtype)}
    logits = [logits_in_float64(side, inputs["scale"], inputs["softcap"]) for side in (inputs, other)]
    log_p, log_m = (z.log_softmax(1) for z in logits)
    lse = [z.logsumexp(1).float() for z in logits]
    live = torch.arange(19) != 5
    anchor = inputs | {name: other[name] for name in ("hidden", "head", "bias")}
    found = triton_divergence.divergence_sums(
        inputs_of_a_pass(inputs, dtype), inputs_of_a_pass(anchor, dtype), *lse, live
    )
    absolute, relative = (log_p.exp() - log_m.exp()).abs().sum(1), (log_m.exp() * (log_m - log_p)).sum(1)
    assert (found[5] == 0).all()
    # A log-prob is off by ε, the float32 rounding of 40 products and of the log-sum-exp. To first order, so is each
    # relative term of Σ|m − p|; the terms of the KL are quadratic near 0, and off by ε |m − p|.
    off = 2 * 40**0.5 * 2**-24 * torch.cat(logits).abs().amax()
    assert ((found[:, 0] - absolute).abs()[live] <= 2 * off).all()
    assert ((found[:, 1] - relative).abs()[live] <= 2 * off * (absolute + off)[live] + 1e-6 * relative[live]).all()


@interpreted
def test_divergences_of_equal_policies_are_0_and_impossible_words_count(small_blocks):
    inputs, _ = make(*SHAPES["ragged"], bias=True)
    raw = inputs["hidden"] @ inputs["head"].T + inputs["bias"]
    one, lse, live = inputs_of_a_pass(inputs, torch.float32), raw.logsumexp(1), torch.ones(19, dtype=torch.bool)
    assert (triton_divergence.divergence_sums(one, one, lse, lse, live) == 0).all()
    closed = inputs["bias"].clone()
    closed[250:] = -torch.inf
    less, fewer = one._replace(bias=closed), (raw - inputs["bias"] + closed).logsumexp(1)
    absolute, relative = triton_divergence.divergence_sums(one, less, lse, fewer, live).unbind(1)
    torch.testing.assert_close(absolute / 2, 1 - (fewer - lse).exp(), rtol=1e-4, atol=1e-6)  # the anchor's own words
    torch.testing.assert_close(relative, lse - fewer, rtol=1e-4, atol=1e-6)
    assert (triton_divergence.divergence_sums(less, one, fewer, lse, live)[:, 1] == torch.inf).all()


CALLS = {
    "sampled token only": {},
    "ids and entropy": {"gather": True, "entropy": True},
    "frozen head": {"gather": True, "entropy": "detached", "frozen": True},
    "top-k": {"top_k": 4, "entropy": True},
    "everything": {"gather": True, "entropy": True, "top_k": 4, "against": True, "per token": True},
    "recorded logsumexp": {"gather": True, "against": True, "recorded": True},
}


def call(impl, case, ignored=(), dtype=torch.float32):
    """Outputs and gradients of the public function."""
    given, _ = make(13, 8, 60, 5, dtype, bias=True, temperature=True)
    other, _ = make(13, 6, 60, 5, dtype, seed=2)
    token = given["ids"][:, 0].clone()
    token[list(ignored)] = -1
    frozen = case.get("frozen", False)
    leaves = [given[n].clone().requires_grad_(n == "hidden" or not frozen) for n in ("hidden", "head", "bias")]
    recorded = (other["hidden"] @ other["head"].T / 0.7).logsumexp(1) if case.get("recorded") else None
    out = trustrl.token_logprobs(
        leaves[0], leaves[1], token, gather_ids=given["ids"][:, 1:] if case.get("gather") else None,
        entropy=case.get("entropy", False), top_k=case.get("top_k", 0), bias=leaves[2],
        temperature=given["scale"] if case.get("per token") else 0.7, softcap=5.0, impl=impl,
        against=AnchorStates(other["hidden"], other["head"], None, recorded) if case.get("against") else None,
    )  # fmt: skip
    found = {n: x for n, x in out._asdict().items() if isinstance(x, torch.Tensor) and n != "logp_error"}
    if out.topk is not None:
        found |= {"top logp": out.topk.logp, "top ids": out.topk.ids, "top tail": out.topk.tail_logp}
    weights = torch.linspace(-1, 1, 13)  # the middle row has none
    total = sum(
        (weights.view(-1, *[1] * (x.ndim - 1)) * torch.where(x.isfinite(), x, 0.0) * (1 + i)).sum()
        for i, x in enumerate(found.values())
        if x.is_floating_point()
    )
    total.backward()
    grads = {f"d {n}": x.grad for n, x in zip(("hidden", "head", "bias"), leaves, strict=True) if x.grad is not None}
    return {n: x.detach() for n, x in found.items()} | grads


@interpreted
@pytest.mark.parametrize("ignored", [[4], []], ids=["one row ignored", "every row used"])
@pytest.mark.parametrize("case", CALLS)
def test_through_the_public_function_it_gives_what_the_chunked_pass_gives(case, ignored, small_blocks):
    chunked, triton = (call(impl, CALLS[case], ignored) for impl in ("chunked", "triton"))
    assert chunked.keys() == triton.keys()
    for name, want in chunked.items():
        torch.testing.assert_close(triton[name], want, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@interpreted
def test_no_wait_and_no_copy_from_the_host(small_blocks):
    """Launches themselves run in the interpreter and are not counted; everything around them is."""
    with counted() as counts:
        call("triton", CALLS["everything"], [4])
    ours = [
        place
        for place in counts.waits + counts.copies
        if place.file.startswith(("trustrl/kernels/triton", "trustrl/kernels/vocab_pass"))
    ]
    assert not ours, str(counts)
    assert counts.kernels


@interpreted
@pytest.mark.parametrize("ranks", [2])
def test_a_sharded_head_gives_what_the_whole_head_gives(ranks, tmp_path):
    mp.start_processes(vocab_ranks.agree_in_triton, args=(ranks, str(tmp_path)), nprocs=ranks, start_method="spawn")


@interpreted
def test_the_backward_pass_moves_what_its_docstring_says(monkeypatch):
    """Slices, the buffer, and the bytes of d_hidden that its products read and write, counted for growing N."""
    monkeypatch.setattr(triton_pass, "BUFFER_BYTES", 4_000)
    launch = triton_launch.LAUNCHES["cuda", 4]._replace(rows=16, columns=16, depth=16)
    monkeypatch.setitem(triton_launch.LAUNCHES, ("cuda", 4), launch)
    D, V = 16, 16 * 40
    for N in (1, 8, 40):
        inputs, upstream = make(N, D, V, 1)
        rest, inner = (triton_pass.forward(*inputs.values())[i] for i in (2, 3))
        with Sizes() as sizes:
            triton_pass.backward(*inputs.values(), rest, inner, *(x.float() for x in upstream), (True, True, True))
        slices = len(sizes.sums)
        buffer = max(x for x in sizes.zeros if x != 4 * N * D)
        assert slices <= triton_pass.SLICES
        assert slices == math.ceil(V / (buffer // (4 * N)))
        assert buffer <= max(4_000, 4 * N * 16 * math.ceil(V / 16 / triton_pass.SLICES))
        assert sum(sizes.sums) == slices * 8 * N * D
        assert (slices == triton_pass.SLICES - 2) == (N == 40)  # 40 tiles of columns in slices of 3


@interpreted
def test_merging_splits_and_candidates_takes_what_its_docstring_says():
    """40 bytes for each split and token, 48 for each candidate; torch's own scratch space is not seen."""
    S, N, K = 4, 500, 20
    raw, ids = torch.randn(S, N, K), torch.randint(0, 9999, (S, N, K), dtype=torch.int32)
    with Peak() as candidates:
        _, _, others = triton_pass._best(raw, ids)
        triton_pass._as_split(others, torch.ones(N), 30.0)
    with Peak() as splits:
        triton_pass._merged(*torch.randn(4, S, N))
    assert 20 * S * N * K <= candidates.most + 8 * S * N * K <= 48 * S * N * K  # the lists themselves are 8 bytes
    assert 20 * S * N <= splits.most <= 40 * S * N


class Peak(TorchDispatchMode):
    """Most bytes of tensors that are alive at once, among those made inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.alive = {at: (one, size) for at, (one, size) in self.alive.items() if not one.expired()}
        for x in tree_leaves(result):
            storage = x.untyped_storage()
            self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


class Sizes(TorchDispatchMode):
    """Bytes of each zeroed tensor, and bytes read and written in place by each sum with a product."""

    def __init__(self):
        super().__init__()
        self.zeros, self.sums = [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if "zeros" in operation.name():
            self.zeros.append(result.numel() * result.element_size())
        if "addmm" in operation.name():
            self.sums.append(2 * result.numel() * result.element_size())
        return result
