"""The choice that impl="auto" makes, on a CPU: the function that recognises an accelerator is patched to say yes.

The first tests replace the Triton pass by the chunked one, with or without a fault. The last ones run the kernels
themselves under Triton's interpreter, in the process that `test_triton.py` starts.
"""

import os
import warnings

import pytest
import torch

import trustrl
from trustrl.core import token_logprobs as public, vocabulary_impl
from trustrl.core.token_logprobs import AnchorStates
from trustrl.errors import ConfigError, TrustRLWarning

N, D, V, K = 12, 16, 60, 3
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton.py")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(vocabulary_impl, "_verdicts", {})
    monkeypatch.delenv(vocabulary_impl.VARIABLE, raising=False)


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(vocabulary_impl, "on_accelerator", lambda x: True)
    monkeypatch.setattr(vocabulary_impl, "find_spec", lambda name: object())


class Passes:
    """Stands for both passes: `triton` is the chunked one, changed by `fault`. Counts what ran."""

    def __init__(self, fault=lambda out: out):
        self.fault, self.ran = fault, []

    def __call__(self, call, impl):
        self.ran.append(impl)
        out = public._run_alone(call, "chunked")
        return self.fault(out) if impl == "triton" else out


def arguments(dtype=torch.float32, device_rows=N, **changes):
    g = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(device_rows, D, generator=g).to(dtype) for _ in range(2))
    token = torch.randint(0, V, (device_rows,), generator=g)
    token[1] = -1
    given = {
        "hidden_ND": hidden.requires_grad_(),
        "head_VD": torch.randn(V, D, generator=g).to(dtype).requires_grad_(),
        "token_ids_N": token,
        "gather_ids": torch.randint(-1, V, (device_rows, K), generator=g),
        "top_k": 4,
        "entropy": True,
        "against": AnchorStates(other, torch.randn(V, D, generator=g).to(dtype)),
        "temperature": 0.7,
        "bias": torch.randn(V, generator=g).to(dtype).requires_grad_(),
        "softcap": None,
        "product_dtype": dtype,
    }
    return vocabulary_impl.VocabularyCall(**given | changes)


def test_on_a_cpu_taken_for_an_accelerator_a_pass_that_agrees_is_chosen_after_one_check(accelerator):
    passes, call = Passes(), arguments()
    assert vocabulary_impl.chosen_impl(call, passes) == "triton"
    assert passes.ran == ["chunked", "triton"] * 2  # outputs, then gradients
    assert vocabulary_impl.chosen_impl(arguments(), passes) == "triton"
    with torch.no_grad():  # another kind of request
        assert vocabulary_impl.chosen_impl(call, passes) == "triton"
    assert len(passes.ran) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_cpu_taken_for_an_accelerator_all_dtypes_of_a_right_pass_agree(dtype, accelerator):
    """The stand-in makes bfloat16 products here, which are worse than the Triton pass's; so they are made in float32."""

    def run(call, impl):
        return public._run_alone(call._replace(product_dtype=torch.float32), "chunked")

    assert vocabulary_impl.chosen_impl(arguments(dtype), run) == "triton"


def scaled_gradient(x):
    return x + 0.1 * (x - x.detach())


FAULTS = {
    "logp": lambda out: out._replace(logp=out.logp + 1e-3),
    "logsumexp": lambda out: out._replace(logsumexp=out.logsumexp * 1.001),
    "gathered_logp": lambda out: out._replace(gathered_logp=out.gathered_logp.roll(1, 0)),
    "tail_logp": lambda out: out._replace(tail_logp=out.tail_logp - 1e-3),
    "entropy": lambda out: out._replace(entropy=out.entropy + 1e-3),
    "tv": lambda out: out._replace(tv=out.tv + 1e-3),
    "kl": lambda out: out._replace(kl=out.kl * 1.01),
    "topk.logp": lambda out: out._replace(topk=out.topk._replace(logp=out.topk.logp - 1e-3)),
    "the gradient of the hidden states": lambda out: out._replace(logp=scaled_gradient(out.logp)),
    "a NaN": lambda out: out._replace(logp=out.logp * torch.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_on_a_cpu_taken_for_an_accelerator_a_wrong_pass_is_refused_once_and_loudly(fault, accelerator):
    passes, call = Passes(FAULTS[fault]), arguments()
    name = "logp" if fault == "a NaN" else fault
    with pytest.warns(TrustRLWarning, match=rf"disagrees on {name}, by .*TRUSTRL_VOCAB_IMPL=chunked"):
        assert vocabulary_impl.chosen_impl(call, passes) == "chunked"
    so_far = len(passes.ran)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vocabulary_impl.chosen_impl(call, passes) == "chunked"
    assert len(passes.ran) == so_far


@pytest.mark.parametrize("leaf", ["head_VD", "bias"])
def test_on_a_cpu_taken_for_an_accelerator_each_wanted_gradient_is_compared(leaf, accelerator):
    call = arguments()
    frozen = {name: getattr(call, name).detach() for name in {"hidden_ND", "head_VD", "bias"} - {leaf}}
    name = {"head_VD": "head", "bias": "bias"}[leaf]
    passes = Passes(FAULTS["the gradient of the hidden states"])
    with pytest.warns(TrustRLWarning, match=f"disagrees on the gradient of the {name}"):
        assert vocabulary_impl.chosen_impl(call._replace(**frozen), passes) == "chunked"


def test_on_a_cpu_taken_for_an_accelerator_a_pass_that_does_not_compile_is_refused(accelerator):
    def fault(out):
        raise RuntimeError("ptxas fatal")

    with pytest.warns(TrustRLWarning, match=r"failed \(RuntimeError: ptxas fatal\)"):
        assert vocabulary_impl.chosen_impl(arguments(), Passes(fault)) == "chunked"


def test_an_error_of_the_chunked_pass_is_raised(accelerator):
    def run(call, impl):
        raise ValueError("the caller's own mistake")

    with pytest.raises(ValueError, match="own mistake"):
        vocabulary_impl.chosen_impl(arguments(), run)


def test_a_batch_without_a_live_row_decides_nothing(accelerator):
    passes = Passes()
    call = arguments(token_ids_N=torch.full((N,), -1))
    assert vocabulary_impl.chosen_impl(call, passes) == "chunked"
    assert vocabulary_impl.chosen_impl(arguments(), passes) == "triton"


def test_a_batch_with_a_nan_is_compared_without_it(accelerator):
    call = arguments()
    with torch.no_grad():
        call.hidden_ND[3] = torch.nan
    assert vocabulary_impl.chosen_impl(call, Passes()) == "triton"
    vocabulary_impl._verdicts.clear()
    with pytest.warns(TrustRLWarning, match="disagrees on entropy"):
        assert vocabulary_impl.chosen_impl(call, Passes(FAULTS["entropy"])) == "chunked"


@pytest.mark.compiled
@pytest.mark.parametrize("verdict", [True, False, None])
def test_inside_torch_compile_only_an_earlier_verdict_counts(verdict, accelerator):
    passes, call = Passes(), arguments()
    if verdict is not None:
        vocabulary_impl._verdicts[vocabulary_impl._kind(call)] = verdict

    def traced(hidden):
        factor = {"triton": 3, "chunked": 2}[vocabulary_impl.chosen_impl(call._replace(hidden_ND=hidden), passes)]
        return hidden * factor

    found = torch.compile(traced, fullgraph=True, backend="eager")(call.hidden_ND)
    assert torch.equal(found, call.hidden_ND * (3 if verdict else 2))
    assert passes.ran == []


@pytest.mark.parametrize(
    "changes",
    [
        {"product_dtype": torch.float64},
        {"hidden_ND": torch.zeros(N, 24)[:, :20], "head_VD": torch.zeros(V, 20), "against": None},
        {"against": AnchorStates(torch.zeros(N, 9), torch.zeros(V, 9))},
    ],
    ids=["dtype", "hidden size", "anchor's hidden size"],
)
def test_what_triton_does_not_support_is_not_even_tried(changes, accelerator):
    passes = Passes()
    assert vocabulary_impl.chosen_impl(arguments(**changes), passes) == "chunked"
    assert passes.ran == []


def test_a_cpu_and_a_machine_without_triton_use_the_chunked_pass(monkeypatch):
    passes = Passes()
    assert vocabulary_impl.chosen_impl(arguments(), passes) == "chunked"
    monkeypatch.setattr(vocabulary_impl, "on_accelerator", lambda x: True)
    monkeypatch.setattr(vocabulary_impl, "find_spec", lambda name: None)
    assert vocabulary_impl.chosen_impl(arguments(), passes) == "chunked"
    assert passes.ran == []


@pytest.mark.parametrize("wanted", ["chunked", "triton"])
def test_the_environment_decides_instead_of_auto(wanted, accelerator, monkeypatch):
    monkeypatch.setenv("TRUSTRL_VOCAB_IMPL", wanted)
    passes = Passes()
    assert vocabulary_impl.chosen_impl(arguments(), passes) == wanted
    assert passes.ran == []


def test_the_environment_names_an_implementation(monkeypatch):
    monkeypatch.setenv("TRUSTRL_VOCAB_IMPL", "cuda")
    with pytest.raises(ConfigError, match="TRUSTRL_VOCAB_IMPL must be one of"):
        trustrl.token_logprobs(torch.zeros(1, 16), torch.zeros(5, 16), torch.tensor([0]))
    out = trustrl.token_logprobs(torch.zeros(1, 16), torch.zeros(5, 16), torch.tensor([0]), impl="chunked")
    assert out.logp.exp() == pytest.approx(0.2)


def public_call(call):
    return trustrl.token_logprobs(*call[:3], **dict(zip(call._fields[3:], call[3:], strict=True)))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_the_interpreter_taken_for_an_accelerator_the_kernels_agree(dtype, accelerator):
    call = arguments(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrustRLWarning)
        public_call(call).logp.sum().backward()
    assert list(vocabulary_impl._verdicts.values()) == [True]
    assert call.head_VD.grad.isfinite().all()


@interpreted
def test_in_the_interpreter_taken_for_an_accelerator_a_wrong_kernel_does_not_train(accelerator, monkeypatch):
    from trustrl.kernels import triton_pass

    right, call = triton_pass.backward, arguments()

    def wrong(*args):
        d_hidden, d_head, d_bias = right(*args)
        d_head[0] += d_head.norm()
        return d_hidden, d_head, d_bias

    monkeypatch.setattr(triton_pass, "backward", wrong)
    with pytest.warns(TrustRLWarning, match="disagrees on the gradient of the head"):
        public_call(call).logp.sum().backward()
    found, call = call.head_VD.grad, arguments()
    trustrl.token_logprobs(*call[:3], temperature=0.7, bias=call.bias, impl="chunked").logp.sum().backward()
    torch.testing.assert_close(found, call.head_VD.grad)
