"""transformers as verl's sampler on a CPU: runs in verl's environment, and returns the exact log-probs of its samples.

B: requests of a batch, T: tokens of the longest, V: vocabulary, K: most probable ids.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trustrl.engines.common.sampler_fields import TOPK_IDS, TOPK_LOGP
from trustrl.errors import ConfigError, EngineError
from trustrl_verl_cpu.sampler_server import Answer, BatchingServer, Bucket, Limits, Request, scores

LOGIT_BYTES = 128 << 20
"""Largest size of the logits in one scoring pass, which needs all logits of each sequence."""

NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""verl's sampling parameters that change the distribution and are not supported, with their neutral values."""


class TransformersServer(BatchingServer):
    """Server that samples in batches, at a temperature, with a key-value cache.

    Args:
        path: The model's folder.
        limits: Lengths of prompts and responses.
        batch_size: The largest number of requests that are answered together.
        dtype: The dtype of weights and activations, such as "float32".
        load_weights: Whether to load the checkpoint. False starts from random weights, which must be replaced before
            the first request.
        ignore_eos: Whether to continue to the longest response.
        seed: The seed of the random stream that tokens are drawn from.
    """

    def __init__(
        self, path: str, limits: Limits, *, batch_size: int, dtype: str, load_weights: bool, ignore_eos: bool, seed: int
    ) -> None:
        super().__init__(limits, batch_size)
        self._path, self._dtype, self._from_checkpoint = path, getattr(torch, dtype), load_weights
        self._ignore_eos, self._seed = ignore_eos, seed
        self._missing: set[str] = set()

    def _start(self) -> None:
        torch.set_num_threads(1)
        settings: dict[str, Any] = {"dtype": self._dtype, "attn_implementation": "eager"}
        if self._from_checkpoint:
            model = AutoModelForCausalLM.from_pretrained(self._path, **settings)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self._path), **settings)
        self._model: Any = model.eval().requires_grad_(False)
        ends = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self._ends = torch.tensor([] if self._ignore_eos else [end for end in ends if end is not None])
        self._random = torch.Generator().manual_seed(self._seed)

    def _answers(self, requests: list[Request]) -> list[Answer]:
        for request in requests:
            _refuse_other_distributions(request, self._model.config.vocab_size)
        return super()._answers(requests)

    @torch.inference_mode()
    def _sampled(self, requests: list[Request]) -> list[Answer]:
        ids_BT, mask_BT = _padded([request.prompt_ids for request in requests], left=True)
        temperature_B1 = torch.tensor([[request.temperature] for request in requests])
        most_B = torch.tensor([request.max_tokens for request in requests])
        going_B = torch.ones(len(requests), dtype=torch.bool)
        position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        drawn, logps, tops, cache = [], [], [], None
        widths = [request.wanted.top_k for request in requests]
        for length in range(1, int(most_B.max()) + 1):
            out = self._model(
                input_ids=ids_BT, attention_mask=mask_BT, position_ids=position_BT, past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            cache = out.past_key_values
            token_B1, logp_B1, logp_BV = self._draw(out.logits[:, -1].float(), temperature_B1)
            # A finished response stays in the batch; its further tokens are cut off below.
            drawn.append(token_B1.masked_fill(~going_B[:, None], -1))
            logps.append(logp_B1)
            tops.append(logp_BV.topk(max(widths)))
            going_B &= ~torch.isin(token_B1[:, 0], self._ends) & (length < most_B)
            if not going_B.any() or self._interrupted.is_set():
                break
            ids_BT, position_BT = token_B1, position_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, torch.ones_like(token_B1)], -1)
        token_BT = torch.cat(drawn, -1)
        rows = zip(token_BT.tolist(), torch.cat(logps, -1).tolist(), (token_BT >= 0).sum(-1).tolist(), strict=True)
        answers = [
            Answer(token[:n], logp[:n], stop_reason="aborted" if going else "completed")
            for (token, logp, n), going in zip(rows, going_B.tolist(), strict=True)
        ]
        for row, (k, answer) in enumerate(zip(widths, answers, strict=True)):
            if k:
                best = [(top.indices[row, :k], top.values[row, :k]) for top in tops]
                ids, logp = (torch.stack(part)[: len(answer.token_ids)] for part in zip(*best, strict=True))
                answer.extra_fields.update({TOPK_IDS: ids.int().numpy(), TOPK_LOGP: logp.numpy()})
        return answers

    def _draw(self, logits_BV: Tensor, temperature_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        greedy_B1 = temperature_B1 == 0
        logp_BV = torch.log_softmax(logits_BV / torch.where(greedy_B1, 1.0, temperature_B1), -1)
        token_B1 = torch.multinomial(logp_BV.exp(), 1, generator=self._random)
        token_B1 = torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), token_B1)
        return token_B1, logp_BV.gather(-1, token_B1), logp_BV

    @torch.inference_mode()
    def _scored(self, requests: list[Request], k: int) -> Iterator[Answer]:
        row_bytes = 4 * self._model.config.vocab_size * max(len(request.prompt_ids) for request in requests)
        size = max(1, LOGIT_BYTES // row_bytes)
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            ids_BT, mask_BT = _padded([request.prompt_ids for request in part], left=False)
            logits_BTV = self._model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
            for request, ids_T, logits_TV in zip(part, ids_BT, logits_BTV, strict=True):
                # Raw at every temperature, like the scores of verl's other samplers.
                logp_TV = torch.log_softmax(logits_TV[: len(request.prompt_ids) - 1].float(), -1)
                if k:
                    best = logp_TV.topk(k)
                    yield scores(best.indices.tolist(), best.values.tolist(), k)
                else:
                    token_T1 = ids_T[1 : len(request.prompt_ids), None]
                    yield scores(token_T1.tolist(), logp_TV.gather(-1, token_T1).tolist(), k)

    def _begin_weights(self) -> None:
        parameters = self._model.named_parameters()
        self._missing = {part for name, weight in parameters for part in _experts(name, weight) or {name: weight}}

    def _load_weights(self, bucket: Bucket) -> None:
        weights: dict[str, Tensor] = self._model.state_dict()
        parts = {name: _experts(name, weight) for name, weight in weights.items()}
        weights |= {part: view for views in parts.values() for part, view in views.items()}
        for name, tensor in bucket.tensors():
            if name not in weights or weights[name].shape != tensor.shape:
                raise EngineError(
                    f"The trainer's {name} of shape {tuple(tensor.shape)} must be one of the sampler's weights, and it "
                    "is not. Load both from the same model, and merge adapters (model.lora.merge=True)."
                )
            weights[name].copy_(tensor)
            self._missing -= {name, *parts.get(name, ())}

    def _end_weights(self) -> None:
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise EngineError(
                f"The trainer must send all of the sampler's weights, and {len(self._missing)} are missing: {some}. "
                "Load both from the same model."
            )


def _experts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Returns the matrices of a tensor of all experts, under their names in checkpoints and in Megatron."""
    prefix, _, kind = name.rpartition(".")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    if not prefix.endswith(".experts") or weight.ndim != 3 or not kinds:
        return {}
    return {
        f"{prefix}.{expert}.{part}.weight": view
        for expert, matrices in enumerate(weight)
        for part, view in zip(kinds, matrices.chunk(len(kinds)), strict=True)
    }


def _padded(sequences: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), longest, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        where = slice(longest - len(sequence), None) if left else slice(len(sequence))
        ids[row, where], mask[row, where] = torch.tensor(sequence), 1
    return ids, mask


def _refuse_other_distributions(request: Request, vocabulary: int) -> None:
    for name, neutral in NEUTRAL.items():
        value = request.options.get(name)
        if value not in (None, neutral) and not (name == "top_k" and value <= 0):
            raise ConfigError(
                f"{name} must be {neutral} with rollout.name=transformers_cpu, got {value}. Use "
                "rollout.name=vllm_cpu to change it."
            )
    k = max(request.prompt_logprobs or 0, request.wanted.top_k)
    if k > vocabulary:
        raise ConfigError(f"K must be at most the vocabulary's size {vocabulary}, got {k}. Lower the region's K.")
