"""Cost of the sampler's top-K: CPU time and bytes per token of four ways to get it, and of a training step.

    python benchmarks/sampler_cost.py tokens [--rounds 5]
    python benchmarks/sampler_cost.py step [--before SRC] [--rounds 3]

Needs the environment with vLLM. `tokens` compares vLLM's lists of dictionaries, its flat lists, trustrl's arrays, and
a second request that scores the finished sequences, which is how trustrl 0.1.0 got its top-K. The ways alternate;
figures are medians over rounds of CPU time. For the first three that is vLLM's frontend and the conversion to tensors;
the engine's own work is the same for them. `step` runs a Top-K region in TRL with this trustrl and with the source
folder of another one, in processes that alternate.
"""

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}

WIDTHS = (0, 20, 64, 256)
ROWS, PROMPT, TOKENS = 16, 32, 64


def save_model(folder: str) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, "a": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, eos_token_id=1,
        )
    ).save_pretrained(folder)  # fmt: skip


# ── per token ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tokens(rounds: int) -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from trustrl.engines.vllm.decode_record import REQUEST, install
    from trustrl.engines.vllm.options import cpu_options
    from trustrl.engines.vllm.scoring import score

    install()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        llm = LLM(
            folder, max_model_len=256, max_logprobs=-1, logprobs_mode="processed_logprobs", seed=0,
            enable_prefix_caching=False, **cpu_options(kv_cache_memory_bytes=1 << 28),
        )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 511, (ROWS, PROMPT), generator=draw).tolist()
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    count = ROWS * TOKENS

    def sample(k: int | None, **how: object) -> list:
        parameters = [
            SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=k, seed=row, detokenize=False, **how)
            for row in range(ROWS)
        ]
        return llm.generate(inputs, parameters, use_tqdm=False)

    spent = {"frontend": 0.0}
    update = LogprobsProcessor.update_from_output

    def timed(self: object, output: object) -> None:
        start = time.thread_time()
        update(self, output)
        spent["frontend"] += time.thread_time() - start

    LogprobsProcessor.update_from_output = timed

    def from_dicts(found: list) -> object:
        return [[[(i, p.logprob) for i, p in at.items()] for at in one] for one in found]

    def from_flat(found: list) -> object:
        return [(torch.tensor(one.token_ids), torch.tensor(one.logprobs)) for one in found]

    def from_arrays(found: list) -> object:
        return [tuple(map(torch.from_numpy, one.table())) for one in found]

    ways = {
        "dictionaries": ({}, from_dicts),
        "flat lists": ({"flat_logprobs": True}, from_flat),
        "arrays": ({"extra_args": {REQUEST: True}}, from_arrays),
    }

    def decoded(k: int, name: str) -> tuple[float, list]:
        how, read = ways[name]
        spent["frontend"] = 0.0
        found = [output.outputs[0].logprobs for output in sample(k, **how)]
        start = time.thread_time()
        read(found)
        return (spent["frontend"] + time.thread_time() - start) / count * 1e6, found

    def rescored(k: int, sequences: list[list[int]]) -> float:
        start = time.process_time()
        score(llm, sequences, [PROMPT] * ROWS, k)
        return (time.process_time() - start) / count * 1e6

    outputs = sample(0)
    sequences = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    rescored(0, sequences)
    for k in WIDTHS:
        taken: dict[str, list[float]] = {name: [] for name in ("sampling", *ways, "second request")}
        sizes = {}
        for _ in range(rounds):
            start = time.process_time()
            sample(None)
            taken["sampling"].append((time.process_time() - start) / count * 1e6)
            for name in ways:
                cost, found = decoded(k, name)
                taken[name].append(cost)
                if name == "arrays":
                    sizes[name] = sum(ids.nbytes + logp.nbytes for ids, logp in (one.table() for one in found)) / count
                else:
                    sizes[name] = len(pickle.dumps(found)) / count
            taken["second request"].append(rescored(k, sequences))
        microseconds = {name: round(statistics.median(values), 1) for name, values in taken.items()}
        line = {"k": k, "microseconds": microseconds, "bytes": {name: round(size) for name, size in sizes.items()}}
        print(json.dumps(line), flush=True)


# ── per training step ───────────────────────────────────────────────────────────────────────────────────────────────


def one_run(folder: str) -> None:
    """Trains some steps, and prints the CPU seconds of each rollout and of all steps."""
    from datasets import Dataset
    from trl import GRPOConfig

    from trustrl import config_from_dict
    from trustrl.engines.trl import TrustRegionGRPOTrainer

    settings = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, num_generations=4,
        per_device_train_batch_size=32, max_completion_length=TOKENS, num_iterations=1, max_steps=6, save_strategy="no",
        logging_steps=1, disable_tqdm=True, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=128,
        vllm_importance_sampling_correction=False, model_init_kwargs={"dtype": "float32"}, learning_rate=1e-4,
    )  # fmt: skip
    # Both this trustrl and the older one with --before know these names.
    region = config_from_dict({"kind": "dppo", "divergence": {"kind": "topk-tv", "k": 64}})
    rollouts = []

    class Timed(TrustRegionGRPOTrainer):
        def _generate_and_score_completions(self, inputs: object) -> dict:
            start = time.process_time()
            found = super()._generate_and_score_completions(inputs)
            rollouts.append(time.process_time() - start)
            return found

    trainer = Timed(
        model=folder, args=settings, region=region,
        reward_funcs=lambda completions, **_: [float(len(text) % 3) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": ["a a a"] * 64}),
        vllm_options={"dtype": "float32", "kv_cache_memory_bytes": 1 << 28},
    )  # fmt: skip
    start = time.process_time()
    trainer.train()
    steps = (time.process_time() - start) / 6
    print("RESULT " + json.dumps({"rollout": statistics.median(rollouts[1:]), "step": steps}), flush=True)


def step(before: str | None, rounds: int) -> None:
    import trustrl

    sources = {"now": os.path.dirname(os.path.dirname(trustrl.__file__))} | ({"before": before} if before else {})
    found: dict[str, list[dict]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for _ in range(rounds):
            for name, source in sources.items():
                done = subprocess.run(
                    [sys.executable, os.path.abspath(__file__), "run", folder], env=os.environ | {"PYTHONPATH": source},
                    capture_output=True, text=True,
                )  # fmt: skip
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    raise SystemExit(done.stderr[-2000:])
                found[name].append(json.loads(lines[0].removeprefix("RESULT ")))
                print(name, found[name][-1], flush=True)
    medians = {
        name: {part: round(statistics.median(run[part] for run in runs), 3) for part in ("rollout", "step")}
        for name, runs in found.items()
    }
    print(json.dumps(medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tokens", "step", "run"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", help="the src folder of another trustrl")
    given = parser.parse_args()
    if given.what == "tokens":
        tokens(given.rounds)
    elif given.what == "step":
        step(given.before, given.rounds)
    else:
        one_run(given.folder)


if __name__ == "__main__":
    main()
