"""`trustrl probe MODEL`: the same tokens through sampler and trainer, and why they differ."""

import argparse
import json
import sys
from pathlib import Path

from trustrl.probe.samples import SAMPLERS

PROMPTS = (
    "The capital of France is",
    "12+30=",
    "Once upon a time there was",
    "def add(a, b):",
    "Water boils at",
    "The opposite of hot is",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("model", metavar="MODEL", help="a name trustrl knows, a folder, or a hub id with a slash")
    parser.add_argument("--sampler", choices=SAMPLERS, default="vllm", help="who draws the tokens (vllm)")
    parser.add_argument("--dtype", default="bfloat16", help="of the sampler; the trainer reads in float32 (bfloat16)")
    parser.add_argument("--temperature", type=float, default=1.0, help="at which tokens are drawn (1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus of the sampler (1: all)")
    parser.add_argument("--top-k", type=int, default=0, help="most probable ids of the sampler (0: all)")
    parser.add_argument(
        "--logprobs", default="processed", help="what the sampler records: processed or raw (processed)"
    )
    parser.add_argument("--length", type=int, default=32, help="tokens of a completion (32)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line (six short ones of our own)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints quantiles, worst tokens and the verdict; 1 where the two sides do not belong together."""
    from trustrl import models
    from trustrl.cli.tokenizers import tokenizer_of
    from trustrl.errors import ConfigError
    from trustrl.probe.samples import Drawing, draw, require_sampler

    names = ("dtype", "temperature", "top_p", "top_k", "logprobs", "length", "seed")
    drawing = Drawing(**{name: getattr(options, name) for name in names})
    lines = _prompts(options.prompts)
    if not lines:
        raise ConfigError(f"--prompts must have a line with text, got none in {options.prompts}.")
    require_sampler(options.sampler)
    where = models.path(options.model)
    tokenizer = tokenizer_of("MODEL", options.model)
    prompts = [ids for line in lines if (ids := list(tokenizer(line).input_ids))]
    print(f"{options.model}: {options.sampler} in {drawing.dtype}, trainer in float32", file=sys.stderr)
    completions = draw(options.sampler, where, prompts, drawing)

    import torch

    from trustrl.probe import diagnosis, readings, report

    recorded = torch.tensor([x for one in completions for x in one.logp], dtype=torch.float64)
    read = readings.by_transformers(where, completions, drawing.temperature)
    found = diagnosis.diagnose(recorded, read)
    made = report.report(completions, recorded, read, found, tokenizer.decode)
    print(json.dumps(made.to_dict(), indent=1) if options.json else report.text(made))
    return 0 if found.is_sound else 1


def _prompts(file: Path | None) -> list[str]:
    from trustrl.errors import ConfigError

    if file is None:
        return list(PROMPTS)
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts must be a text file, got {file}: {error}.") from error
