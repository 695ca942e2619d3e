"""Choice between the chunked and the Triton pass over the vocabulary, with a check before Triton's first use.

A kernel that compiles can still be wrong on a GPU, a driver or a Triton release that nobody tried. So `impl="auto"`
runs both passes on a few rows of the first batch, and compares all requested outputs and gradients. The verdict holds
for the process, per device, dtype and kind of request. The check is the only time that `token_logprobs` waits for the
device.
"""

import os
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trustrl.config.validators import one_of
from trustrl.errors import TrustRLWarning
from trustrl.kernels.logprob_outputs import TokenLogprobs

VARIABLE = "TRUSTRL_VOCAB_IMPL"
"""Environment variable that replaces `impl="auto"`."""

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

ROWS_CHECKED = 64
"""Number of rows of the first batch that both passes compute."""

COLUMNS_CHECKED = 16_384
"""Number of vocabulary ids for which the head's gradient is compared. The outputs are compared on all of them."""

_verdicts: dict[tuple[Any, ...], bool] = {}


class VocabularyCall(NamedTuple):
    """The arguments of `token_logprobs` that both passes take."""

    hidden_ND: Tensor
    head_VD: Tensor
    token_ids_N: Tensor
    gather_ids: Tensor | None
    top_k: int
    entropy: Any
    against: Any
    temperature: float | Tensor
    bias: Tensor | None
    softcap: float | None
    product_dtype: torch.dtype

    @property
    def comparable(self) -> Tensor:
        """True on rows that are not ignored and have finite hidden states."""
        return (self.token_ids_N >= 0) & self.hidden_ND.isfinite().all(-1)

    def small(self, num_columns: int, dtype: torch.dtype) -> "VocabularyCall":
        """Returns the call for a few rows and the first columns, without gradients, on inputs rounded to `dtype`.

        Ids of other columns become ids of these.
        """
        rows = self.comparable.nonzero().squeeze(-1)[:ROWS_CHECKED]
        head = self.head_VD[:num_columns].detach().to(dtype)
        gather, against = self.gather_ids, self.against
        if gather is not None:
            gather = torch.where(gather[rows] >= 0, gather[rows] % len(head), -1)
        if against is not None:
            against = against._replace(
                hidden=against.hidden[rows].detach().to(dtype),
                head=against.head[:num_columns].detach().to(dtype),
                bias=None if against.bias is None else against.bias[:num_columns].detach(),
                logsumexp=None if against.logsumexp is None else against.logsumexp[rows],
            )
        return self._replace(
            hidden_ND=self.hidden_ND[rows].detach().to(dtype),
            head_VD=head,
            token_ids_N=self.token_ids_N[rows] % len(head),
            gather_ids=gather,
            top_k=min(self.top_k, len(head)),
            against=against,
            temperature=self.temperature[rows].detach() if isinstance(self.temperature, Tensor) else self.temperature,
            bias=None if self.bias is None else self.bias[:num_columns].detach(),
        )


Pass = Callable[[VocabularyCall, str], TokenLogprobs]
"""Runs `token_logprobs` with an implementation chosen by name."""


def chosen_impl(call: VocabularyCall, run: Pass) -> str:
    """Returns the implementation that `impl="auto"` uses: `chunked` or `triton`, or the environment's choice."""
    wanted = os.environ.get(VARIABLE, "auto")
    one_of(VARIABLE, wanted, ("auto", "chunked", "triton"))
    if wanted != "auto":
        return wanted
    kind = _kind(call)
    if torch.compiler.is_compiling():  # only a verdict of an earlier call can be used
        return "triton" if _verdicts.get(kind, False) else "chunked"
    if not _applies(call):
        return "chunked"
    if kind not in _verdicts:
        if not _can_be_checked(call):
            return "chunked"
        problem = _disagreement(call, run)
        _verdicts[kind] = problem is None
        if problem is not None:
            warnings.warn(
                f"The Triton vocabulary pass {problem}. Compared on {ROWS_CHECKED} rows of this batch with the chunked "
                f"pass, on {call.hidden_ND.device} in {call.product_dtype}. trustrl uses the chunked pass instead, "
                f'which is slower and needs no Triton. To silence this, set {VARIABLE}=chunked or pass impl="chunked". '
                "Please report it with your GPU, torch.__version__ and triton.__version__.",
                TrustRLWarning,
                stacklevel=3,
            )
    return "triton" if _verdicts[kind] else "chunked"


def on_accelerator(x: Tensor) -> bool:
    """Returns True if Triton's kernels can run where this tensor is. torch calls AMD GPUs `cuda` as well."""
    return x.device.type == "cuda"


def _applies(call: VocabularyCall) -> bool:
    """Returns True if the Triton pass supports the call. Other hidden sizes would cost it a copy of the head."""
    sizes = [call.hidden_ND.shape[1]] + ([] if call.against is None else [call.against.hidden.shape[1]])
    return (
        on_accelerator(call.hidden_ND)
        and call.product_dtype in TRITON_DTYPES
        and all(size % 16 == 0 for size in sizes)
        and find_spec("triton") is not None
    )


def _can_be_checked(call: VocabularyCall) -> bool:
    """Returns False while a graph is traced or captured, and if there is no row to compare."""
    fake = type(call.hidden_ND) not in (Tensor, nn.Parameter)
    if fake or (call.hidden_ND.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(call.comparable.any())


def _wants(call: VocabularyCall) -> tuple[bool, ...]:
    """Returns whether hidden states, head and bias need a gradient."""
    leaves = (call.hidden_ND, call.head_VD, call.bias)
    return tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in leaves)


def _kind(call: VocabularyCall) -> tuple[Any, ...]:
    """Returns everything that selects other kernels or other outputs."""
    against = None if call.against is None else (call.against.bias is None, call.against.logsumexp is None)
    present = (call.gather_ids is None, call.top_k > 0, call.bias is None, call.softcap is None)
    return call.hidden_ND.device, call.product_dtype, *present, call.entropy, against, _wants(call)


def _disagreement(call: VocabularyCall, run: Pass) -> str | None:
    """Returns the first difference between the passes, as the end of a sentence, or None if they agree."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would be the larger error of the two
    try:
        with torch.no_grad():
            difference = _different_outputs(call.small(len(call.head_VD), call.product_dtype), run)
        if difference is None and any(_wants(call)):
            part = call._replace(against=None).small(COLUMNS_CHECKED, call.product_dtype)
            difference = _different_gradients(part, run, _wants(call))
        return difference
    except _TritonError as error:
        return f"failed ({type(error.__cause__).__name__}: {error.__cause__})"
    finally:
        torch.set_float32_matmul_precision(precision)


class _TritonError(Exception):
    """Error of the Triton pass itself."""


@contextmanager
def _of_triton() -> Generator[None]:
    """Context manager that marks errors as Triton's. The compiler's and the driver's errors have no common class."""
    try:
        yield
    except Exception as error:
        raise _TritonError from error


def _different_outputs(call: VocabularyCall, run: Pass) -> str | None:
    """Compares all outputs. They may differ by the rounding that the chunked pass reports for float32 products."""
    expected = run(call._replace(product_dtype=torch.float32), "chunked")
    with _of_triton():
        output = run(call, "triton")
    assert expected.logp_error is not None
    for name, want, got in _pairs(expected, output):
        error_N = expected.logp_error.reshape(-1, *[1] * (want.ndim - 1))
        same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= 16 * error_N * (1 + want.abs()))
        if not bool(same.all()):
            worst = float((got - want).abs().nan_to_num(torch.inf)[~same].max())
            return f"disagrees on {name}, by {worst:.2g}"
    return None


def _different_gradients(call: VocabularyCall, run: Pass, wants: tuple[bool, ...]) -> str | None:
    """Compares the gradients of one loss.

    The Triton pass rounds the logits' gradient to the products' dtype. The results may differ by a few units in its
    last place, relative to a row's gradient or to that of an average row.
    """
    expected = _gradients(call._replace(product_dtype=torch.float32), "chunked", run, wants)
    with _of_triton():
        gradients = _gradients(call, "triton", run, wants)
    allowed = 4 * torch.finfo(call.product_dtype).eps
    for name, want in expected.items():
        rows, others = (
            x.float() if name == "hidden states" else x.float().reshape(1, -1) for x in (want, gradients[name])
        )
        size, off = (x.square().sum(1).sqrt() for x in (rows, others - rows))
        same = (off <= allowed * (size + size.square().mean().sqrt())) | (size.isnan() & off.isnan())
        if not bool(same.all()):
            return f"disagrees on the gradient of the {name}, by {float(off.nan_to_num(torch.inf).max()):.2g}"
    return None


@torch.enable_grad()
def _gradients(call: VocabularyCall, impl: str, run: Pass, wants: tuple[bool, ...]) -> dict[str, Tensor]:
    """Returns the gradients that are wanted, by name."""
    hidden = call.hidden_ND.clone().requires_grad_(wants[0])
    head = call.head_VD.clone().requires_grad_(wants[1])
    bias = None if call.bias is None else call.bias.clone().requires_grad_(wants[2])
    total = _total(run(call._replace(hidden_ND=hidden, head_VD=head, bias=bias), impl))
    leaves = {"hidden states": hidden, "head": head, "bias": bias}
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(total, list(wanted.values())), strict=True))


def _total(out: TokenLogprobs) -> Tensor:
    """Returns a loss of all differentiable outputs, with a different weight for each number."""
    total = out.logp.new_zeros(())
    for _, x, _ in _pairs(out, out):
        if x.requires_grad:
            weights = torch.cos(torch.arange(x.numel(), device=x.device, dtype=x.dtype)).view_as(x)
            total = total + (torch.where(x.isfinite(), x, 0.0) * weights).sum()
    return total


def _pairs(output: TokenLogprobs, other: TokenLogprobs) -> list[tuple[str, Tensor, Tensor]]:
    """Returns (name, output, the other's output). Ids are left out: equal logits may come in any order."""
    names = ("logp", "logsumexp", "gathered_logp", "tail_logp", "entropy", "tv", "kl")
    pairs = [(name, getattr(output, name), getattr(other, name)) for name in names if getattr(output, name) is not None]
    if output.topk is not None and other.topk is not None:
        pairs += [
            (f"topk.{name}", getattr(output.topk, name), getattr(other.topk, name)) for name in ("logp", "tail_logp")
        ]
    return pairs
