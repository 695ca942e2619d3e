"""The Triton pass under Triton's interpreter: no further from float64 truth than plain code in the same dtype.

Triton reads TRITON_INTERPRET when it is first imported, and everything it compiles afterwards is interpreted. The checks
therefore run in a process of their own: `TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py`, or through the one
test here that starts it.
"""

import math
import os
import subprocess
import sys

import pytest
import torch

import trustrl

pytest.importorskip("triton", reason="triton is not installed; `pip install triton==3.7.1` goes with torch 2.13")

pytestmark = pytest.mark.compiled

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_everything_here_under_the_interpreter")

if INTERPRETED:
    from trustrl.kernels import triton_pass


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_everything_here_under_the_interpreter():
    # pytest's own variables are left out: the inner run is no part of this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


# The interpreter truncates float32 to bfloat16 where a GPU rounds to nearest: one unit in the last place, 2⁻⁷.
ULP = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

SHAPES = {  # N, D, V, C
    "one of everything": (1, 1, 1, 1),
    "two columns": (2, 3, 2, 1),
    "sampled token only": (33, 16, 130, 1),
    "ragged": (37, 40, 301, 21),
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
    found = {"rest": rest, "inner": inner, "largest": largest}
    return {k: x.detach() for k, x in found.items()} | {f"d {n}": x for n, x in zip(names, grads, strict=True)}


def by_triton(inputs, upstream, wants=(True, True, True)):
    given = list(inputs.values())
    rest, inner, largest = triton_pass.forward(*given)
    grads = triton_pass.backward(*given, rest, inner, *(up.float() for up in upstream), wants)
    named = {f"d {n}": x for n, x in zip(("hidden", "head", "bias"), grads, strict=True) if x is not None}
    return {"rest": rest, "inner": inner, "largest": largest} | named


def assert_no_further_from_the_truth_than_plain_code(inputs, upstream, dtype):
    truth = by_definition(inputs, upstream, torch.float64)
    plain = by_definition(inputs, upstream, dtype)
    found = by_triton(inputs, upstream)
    assert found.keys() == truth.keys()
    for name, t in truth.items():
        f, p = found[name], plain[name]
        assert f.dtype == (torch.float32 if name in ("rest", "inner", "largest") else dtype), name
        assert torch.equal(f == -torch.inf, t == -torch.inf), name
        t, p, f = (x.double().masked_fill(t == -torch.inf, 0.0) for x in (t, p, f))
        allowed = (t - p).abs().max() + ULP[dtype] * t.abs().max().clamp(min=1e-3)
        worst = (t - f).abs().max()
        assert worst <= allowed, f"{name}: error {worst:.2e}, plain code and rounding make {allowed:.2e}"


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that every shape has several of each: rows, columns, splits, groups, slices of the buffer."""
    launch = {"rows": 16, "columns": 64, "depth": 32, "tiles_per_split": 2, "row_blocks_per_group": 2}
    for at, usual in triton_pass.LAUNCHES.items():
        monkeypatch.setitem(triton_pass.LAUNCHES, at, usual._replace(**launch))
    monkeypatch.setattr(triton_pass, "BUFFER_BYTES", 20_000)
    monkeypatch.setitem(triton_pass.KNOWN_LAUNCH, "DEPTH", 16)


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
    others = torch.arange(37) != 3
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


@interpreted
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("ignored", [[4], []], ids=["one row ignored", "every row used"])
def test_through_the_public_function_it_gives_what_the_chunked_pass_gives(ignored, frozen, small_blocks):
    given, _ = make(13, 8, 60, 5, bias=True)
    hidden, head, bias, ids = (given[name] for name in ("hidden", "head", "bias", "ids"))
    token = ids[:, 0].clone()
    token[ignored] = -1
    results = []
    for impl in ("chunked", "triton"):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
        out = trustrl.token_logprobs(
            h, w, token, gather_ids=ids[:, 1:], entropy=True, bias=bias, temperature=0.7, softcap=5.0, impl=impl
        )
        weight = torch.linspace(-1, 1, 13)  # one row's is 0
        (weight * (out.logp + 0.3 * out.entropy + 0.1 * out.tail_logp)).sum().backward()
        results.append([out.logp, out.gathered_logp, out.tail_logp, out.entropy, h.grad, *([] if frozen else [w.grad])])
    for chunked, triton in zip(*results, strict=True):
        torch.testing.assert_close(triton, chunked, rtol=1e-4, atol=1e-5)
