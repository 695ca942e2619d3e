"""Cost of the sampler's top-K: CPU time and bytes per token of four ways to get it, and of a training step.

    python benchmarks/sampler_cost.py engine [--sampler sglang] [--rounds 5] [--out cost.json]
    python benchmarks/sampler_cost.py tokens [--rounds 5]
    python benchmarks/sampler_cost.py step [--before SRC] [--rounds 3]

Needs the environment with vLLM or SGLang. `engine` measures all of a sampler's CPU time per token at a vocabulary of
49,152, with its own records and with trustrl's, and the frontend's part of a record in vLLM. `tokens` compares vLLM's
lists of dictionaries, its flat lists, trustrl's arrays, and a second request that scores the finished sequences, which
is how trustrl 0.1.0 got its top-K. The ways alternate; figures are medians over rounds of CPU time. For the first three
that is vLLM's frontend and the conversion to tensors; the engine's own work is the same for them. `step` runs a Top-K
region in TRL with this trustrl and with the source folder of another one, in processes that alternate.
"""

import argparse
import functools
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}

import sampler_engines

WIDTHS = (0, 20, 64, 256)
ROWS, PROMPT, TOKENS = 16, 32, 64


def save_model(folder: str, vocabulary: int = 512, layers: int = 4, spread: float = 0.02) -> None:
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
            vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, eos_token_id=1,
            initializer_range=spread,
        )
    ).save_pretrained(folder)  # fmt: skip


# ── engine included ─────────────────────────────────────────────────────────────────────────────────────────────────

VOCABULARY = 49_152
CASES = {
    "K = 0": (0, {}), "K = 20": (20, {}), "K = 64": (64, {}),
    "top-p 0.95, top-k 512": (0, {"top_p": 0.95, "top_k": 512}),
}  # fmt: skip


def engine(name: str, rounds: int) -> dict:
    """Returns microseconds of CPU time and bytes per token, for the sampler's own records and for trustrl's."""
    from trustrl.engines.common.sampler_contract import Wanted

    folder = tempfile.mkdtemp()
    save_model(folder, VOCABULARY, layers=1, spread=0.4)  # a peaked distribution, as a trained model has
    sampler = sampler_engines.ENGINES[name](folder, VOCABULARY)
    prompts = [[5 + row, 6, 7, 8] for row in range(sampler_engines.ROWS)]
    count = sampler_engines.ROWS * sampler_engines.TOKENS

    def microseconds(asked: tuple[dict, dict], read: Callable[[object], object]) -> tuple[float, list]:
        start = sampler.seconds()
        records = [read(completion) for completion in sampler.sample(prompts, *asked)]
        return (sampler.seconds() - start) / count * 1e6, records

    microseconds(({}, {}), id)
    costs = {}
    for case, (k, settings) in CASES.items():
        wanted = Wanted(k, settings.get("top_k", 0))
        ways = {
            "no log-probs": ((settings, {}), id),
            # Kept ids are those with a finite log-prob among the 512 that top-k leaves.
            "own records": (sampler.own(settings, max(k, wanted.max_kept)), sampler.read),
            "trustrl": (
                sampler.adapter.request(wanted, settings),
                functools.partial(sampler.adapter.record, wanted=wanted),
            ),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, (asked, read) in ways.items():
                spent, records = microseconds(asked, read)
                taken[way].append(spent)
        sizes = sum(_bytes_of(record) for record in records) / count
        costs[case] = {
            "microseconds": {way: round(statistics.median(values), 1) for way, values in taken.items()},
            "bytes": round(sizes),
        }
        if wanted.max_kept:
            costs[case]["kept"] = round(sum(len(record.kept.ids) for record in records) / count)
        print(case, json.dumps(costs[case]), flush=True)
    more = {"frontend": frontend()} if name == "vllm" else {}
    return {"vocabulary": VOCABULARY, "requests": sampler_engines.ROWS, "cases": costs, **more}


def _bytes_of(record: object) -> int:
    arrays = [record.tokens, record.logp, record.topk_ids, record.topk_logp, *(record.kept or ())]  # pyright: ignore
    return sum(array.nbytes for array in arrays)


def frontend() -> dict:
    """Returns microseconds per token of the parts of a record: vLLM's slice for a request, our copy, and its read."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    from trustrl.engines.vllm.decode_record import DecodedLogprobs

    parts = {}
    for k in (0, 20, 64):
        draw = np.random.default_rng(0)
        steps = [
            LogprobsLists(
                draw.integers(0, VOCABULARY, (sampler_engines.ROWS, 1 + k)).astype(np.int32),
                draw.random((sampler_engines.ROWS, 1 + k), np.float32), np.ones(sampler_engines.ROWS, np.int64),
            )
            for _ in range(512)
        ]  # fmt: skip
        start = time.process_time()
        slices = [[step.slice_request(row, 1) for row in range(sampler_engines.ROWS)] for step in steps]
        sliced = time.process_time()
        records = [DecodedLogprobs(1 + k) for _ in range(sampler_engines.ROWS)]
        for step in slices:
            for record, lists in zip(records, step, strict=True):
                record.add(*lists[:3])
        added = time.process_time()
        for record in records:
            record.table()
        read = time.process_time()
        times = {"vLLM's slice": sliced - start, "copy": added - sliced, "read": read - added}
        parts[f"K = {k}"] = {name: round(spent / 512 / sampler_engines.ROWS * 1e6, 2) for name, spent in times.items()}
    print(json.dumps(parts), flush=True)
    return parts


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
    parser.add_argument("what", choices=["engine", "tokens", "step", "run"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument(
        "--sampler", choices=list(sampler_engines.ENGINES), default="vllm", help="the one that `engine` measures"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", help="the src folder of another trustrl")
    parser.add_argument("--out", help="a file to write the costs of `engine` to")
    given = parser.parse_args()
    if given.what == "engine":
        costs = engine(given.sampler, given.rounds)
        if given.out:
            version = metadata.version(sampler_engines.ENGINES[given.sampler].package)
            with open(given.out, "w") as file:
                json.dump({"sampler": given.sampler, "version": version, "cost": costs}, file)
    elif given.what == "tokens":
        tokens(given.rounds)
    elif given.what == "step":
        step(given.before, given.rounds)
    else:
        one_run(given.folder)


if __name__ == "__main__":
    main()
