"""`trustrl probe MODEL`: compares sampler and trainer log-probs on the same tokens and diagnoses the gap."""

import argparse
from pathlib import Path

from trustrl.errors import ConfigError
from trustrl.terminal import complain, say, say_json
from trustrl.tools.probe.sampling import SAMPLERS

LARGEST_PROMPTS = 16_000_000
"""Bytes of the largest file of prompts."""

PROMPTS = (
    "The capital of France is",
    "12+30=",
    "Once upon a time there was",
    "def add(a, b):",
    "Water boils at",
    "The opposite of hot is",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl probe`."""
    parser.add_argument(
        "model", metavar="MODEL", help="Model name that trustrl knows, a folder, or a hub id with a slash"
    )
    parser.add_argument(
        "--sampler", choices=SAMPLERS, default="vllm", help="Backend that samples the tokens (default: vllm)"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="Data type of the sampler; the trainer uses float32 (default: bfloat16)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="Sampling temperature (default: 1)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="Sample from the smallest set of tokens with this mass (default: 1, all)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="Sample from this many most likely tokens (default: 0, all)"
    )
    parser.add_argument(
        "--logprobs",
        default="processed",
        help="Log-probs that the sampler records: processed or raw (default: processed)",
    )
    parser.add_argument("--length", type=int, default=32, help="Maximum number of tokens per completion (default: 32)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="Read prompts from this file, one per line (default: six built-in prompts)",
    )
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the sampler (default: 0)")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints quantiles, the worst tokens, and the verdict. Returns 1 if the gap is more than rounding."""
    from trustrl.cli.shared_options import tokenizer_of
    from trustrl.tools.probe.sampling import ProbeSampling, require_sampler, sample_completions
    from trustrl.world import models

    names = ("dtype", "temperature", "top_p", "top_k", "logprobs", "length", "seed")
    drawing = ProbeSampling(**{name: getattr(options, name) for name in names})
    lines = _prompts(options.prompts)
    if not lines:
        raise ConfigError(f"--prompts must have at least one non-empty line, got none in {options.prompts}.")
    require_sampler(options.sampler)
    where = models.path(options.model)
    tokenizer = tokenizer_of("MODEL", options.model)
    prompts = [ids for line in lines if (ids := list(tokenizer(line).input_ids))]
    complain(f"{options.model}: sampler {options.sampler} in {drawing.dtype}, trainer in float32")
    completions = sample_completions(options.sampler, where, prompts, drawing)

    import torch

    from trustrl.tools.probe import probe_report, trainer_logprobs

    recorded = torch.tensor([x for completion in completions for x in completion.logp], dtype=torch.float64)
    read = trainer_logprobs.by_transformers(where, completions, drawing.temperature)
    verdict = probe_report.diagnose(recorded, read)
    made = probe_report.report(completions, recorded, read, verdict, tokenizer.decode)
    say_json(made.to_dict()) if options.json else say(probe_report.text(made))
    return 0 if verdict.is_sound else 1


def _prompts(file: Path | None) -> list[str]:
    from trustrl.files import read_regular

    if file is None:
        return list(PROMPTS)
    try:
        text = read_regular(file, LARGEST_PROMPTS).decode("utf-8")
        return [line for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts must be a text file, got {file}: {error}.") from error
