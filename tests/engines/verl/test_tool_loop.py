"""verl's own tool loop, with its parser, its tokenization and a real tool: the records of three turns are the sampler's.

The server follows a script: answers that are tool calls, and one that is not. Its log-probs are a table's.
"""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from support.tiny_models import character_tokenizer
from trustrl.engines.common.kept_columns import KeptColumn, column_of
from trustrl.engines.common.sampler_fields import KEPT, KEPT_COUNTS, KEPT_IDS, TOPK, TOPK_IDS, TOPK_LOGP
from trustrl.engines.common.seam import version_of
from trustrl.engines.verl import anchors
from trustrl.engines.verl.agent_loop import ToolTopK

K, MAX_KEPT = 4, 20
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "weather_here", "arguments": {"city": "%s"}}</tool_call><end>'
ANSWERS = (CALL % "Ulm", CALL % "Bonn", "sunny in both<end>")


@function_tool(name="weather_here")
def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


class Scripted:
    """Server that answers with the next line of the script, and logs every token with the row it was drawn from."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked, self.log = tokenizer, [], []
        self.logp = torch.randn(2000, len(tokenizer), generator=torch.Generator().manual_seed(0)).log_softmax(-1)
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request_id, prompt_ids, sampling_params, **more):
        tokens = self.tokenizer(ANSWERS[len(self.asked)])["input_ids"]
        self.asked.append(sampling_params["extra_args"])
        version = 3 + len(self.asked)
        rows = self.logp[len(prompt_ids) : len(prompt_ids) + len(tokens)]
        best = rows.topk(K)
        kept = [[token, *range(t % 5)] for t, token in enumerate(tokens)]
        own = rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        rows = zip(tokens, own, best.indices.tolist(), best.values.tolist(), kept, strict=True)
        self.log += [(version, *row) for row in rows]
        column = column_of(kept)
        fields = {
            "global_steps": version, TOPK_IDS: best.indices.int().numpy(), TOPK_LOGP: best.values.numpy(),
            KEPT_IDS: column.ids, KEPT_COUNTS: column.counts,
        }  # fmt: skip
        return TokenOutput(token_ids=tokens, log_probs=own, stop_reason="completed", extra_fields=fields)


def loop_of(server, tokenizer):
    client = object.__new__(LLMServerClient)

    async def acquire(*_, **__):
        return "one", server

    client._acquire_server, client._release_server = acquire, lambda *_, **__: None
    rollout = {
        "prompt_length": 64, "response_length": 400, "full_determinism": False, "name": "vllm",
        "multi_turn": {
            "max_user_turns": None, "max_assistant_turns": 5, "max_parallel_calls": 1, "max_tool_response_length": 100,
            "tool_response_truncate_side": "left", "format": "hermes",
        },
    }  # fmt: skip
    loss = {"loss_mode": "trustrl-dppo-topk-tv", "region": {"divergence": {"k": K}}, "max_kept": MAX_KEPT}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "actor": {"policy_loss": loss}}})
    client.config = config
    return ToolTopK(
        trainer_config=DictConfigWrap(config), server_manager=client, tokenizer=tokenizer, processor=None,
        dataset_cls=RLHFDataset, data_config=DictConfigWrap(OmegaConf.create({})),
        tools=ToolListWrap([FUNCTION_TOOL_REGISTRY["weather_here"]]),
    )  # fmt: skip


@pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's loop tokenizes by other settings")
@pytest.mark.filterwarnings("ignore")
def test_three_turns_of_verls_own_tool_loop_are_recorded_as_the_sampler_said():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    server = Scripted(tokenizer)

    async def run():
        how = {"temperature": 1.0, "top_p": 0.9}
        return await loop_of(server, tokenizer).run(how, raw_prompt=[{"role": "user", "content": "weather?"}])

    out = asyncio.run(run())
    text = tokenizer.decode(out.response_ids)
    assert "sunny in Ulm" in text  # the tool ran, and its answer is in the sequence
    assert "sunny in Bonn" in text
    assert server.asked == [{TOPK: K, KEPT: MAX_KEPT}] * 3  # one request per turn
    mask, found = np.array(out.response_mask, bool), out.extra_fields
    assert 0 < mask.sum() < len(mask)
    kept = KeptColumn(found[KEPT_IDS], found[KEPT_COUNTS]).rows()
    versions, turns = anchors.per_token(found[anchors.REQUESTS], len(mask)).numpy()
    recorded = [
        (
            int(versions[t]), out.response_ids[t], out.response_logprobs[t],
            found[anchors.SAMPLED_IDS][t].tolist(), found[anchors.SAMPLED_LOGP][t].tolist(), kept[t].tolist(),
        )
        for t in mask.nonzero()[0]
    ]  # fmt: skip
    assert recorded == server.log
    assert turns[mask].tolist() == sorted(turns[mask])
    assert set(turns[mask]) == {0, 1, 2}
    assert set(turns[~mask]) == {-1}
    assert not any(len(row) for row, on in zip(kept, mask, strict=True) if not on)
