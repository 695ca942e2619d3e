"""Command-line interface `trustrl`, with one module per verb. Each is imported on use, which keeps `--help` fast.

Exit codes: 0 for success, 1 for a failure or a finding, 2 for wrong usage or an invalid setting.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from trustrl.cli.limited_process import out_of_memory, run_in_child
from trustrl.errors import ConfigError, TrustRLError, UnknownNameError
from trustrl.terminal import complain, escape_warnings, one_line, say

VERBS = {
    "regions": "List the regions with their engines, or explain one",
    "recipes": "List the shipped recipes, or print one to start your own from",
    "plan": "Show what a recipe will do: roles, counts, memory, cost, and the engine's settings",
    "run": "Train a recipe in a new run directory, or resume it with --resume",
    "compare": "Train every region with several seeds, and write a table and figures",
    "select": "Keep the problems that a model solves sometimes, but not always: the data of a sanity test",
    "report": "Summarize runs in the terminal, or write a self-contained HTML page with every token",
    "watch": "Follow runs while they train: a summary in the terminal, and a page that reloads itself",
    "explain": "Diagnose a run: rank likely causes and show the evidence for each",
    "metrics": "Explain a logged metric: its meaning, its healthy range, and how to respond",
    "conformance": "Test a policy loss on small batches with known answers",
    "doctor": "Check this machine: package versions, open ports, settings, threads, and disk",
    "probe": "Compare the log-probs of sampler and trainer on the same tokens, and diagnose the gap",
    "audit": "Replay other regions on recorded tokens and report what each would mask",
    "calibrate": "Estimate sampler-trainer noise from records and recommend a threshold above it",
    "reproduce": "Draw a figure of DPPO's paper from runs, and judge whether they show what it claims",
    "bound": "Evaluate DPPO's improvement bound on recorded tokens, update by update",
    "records": "Check records against their specification, or upload files that wait for an object store",
}
EXAMPLES = {
    "regions": "dppo-topk-tv-capped",
    "recipes": "tour > mine.toml",
    "plan": "qwen3-8gpu --tokens-per-second 300 --price 2.5",
    "run": "tour --out runs/first",
    "compare": "tour --regions pg-is,ppo,dppo-binary-tv-capped --seeds 3 --out runs/compared",
    "select": "dppo-sanity --out perfectible",
    "report": "runs/first runs/second --out report.html",
    "watch": "runs/first --out page.html",
    "explain": "runs/first",
    "metrics": "masked_share",
    "conformance": "my_package.losses:my_loss --kind dppo",
    "doctor": "",
    "probe": "Qwen/Qwen3-0.6B --sampler vllm",
    "audit": "runs/first/records --regions ppo,dppo-topk-tv-capped",
    "calibrate": "runs/first/records --figure noise.png",
    "reproduce": "runs/dppo runs/ppo --figure dppo-3 --out figure-3.png",
    "bound": "runs/first/records",
    "records": "check runs/first/records",
}
"""Arguments of one typical call of each verb."""

RESUMES = {"run": "run the same command with --resume to continue", "compare": "run the same command to continue"}
RESUMES["select"] = RESUMES["compare"]
"""Verbs that keep their progress when interrupted, with the hint for continuing."""

OK, FAILED, WRONG = 0, 1, 2


class _Parser(argparse.ArgumentParser):
    """Parser that escapes what it prints: an argument may be the name of a file from outside."""

    def error(self, message: str) -> NoReturn:
        """Prints the message as one line, and exits."""
        super().error(one_line(message))


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Builds the argument parser of one verb."""
    example = f"Example: trustrl {verb} {EXAMPLES[verb]}".rstrip()
    parser = _Parser(prog=f"trustrl {verb}", description=f"{VERBS[verb]}.", epilog=example)
    import_module(f"trustrl.cli.{verb}").add_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. trustrl's errors are printed as messages without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        say(_help(), file=sys.stdout if words else sys.stderr)
        return OK if words else WRONG
    if words[0] == "--version":
        import trustrl

        say(trustrl.__version__)
        return OK
    verb, *rest = words
    if verb not in VERBS:
        from trustrl.registry import nearest

        return _complain(f"Unknown verb {verb!r}.{nearest(verb, list(VERBS))} Known: {', '.join(VERBS)}.", WRONG)
    try:
        options = parser_of(verb).parse_intermixed_args(rest)
    except SystemExit as ended:  # argparse has printed the reason
        return int(ended.code or 0)
    try:
        return import_module(f"trustrl.cli.{verb}").run(options)
    except (ConfigError, UnknownNameError) as error:
        return _complain(str(error), WRONG)
    except TrustRLError as error:
        return _complain(str(error), FAILED)
    except MemoryError:
        return _complain(out_of_memory(), FAILED)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # as torch says it
            raise
        return _complain(out_of_memory(), FAILED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or verb in RESUMES:  # training runs need the traceback
            raise
        return _complain(f"{str(error).rstrip('.')}.", FAILED)
    except KeyboardInterrupt:
        return _complain(f"Interrupted; {RESUMES[verb]}." if verb in RESUMES else "Interrupted.", FAILED)


def console() -> None:
    """Runs the console script. Exits silently if the reader, such as `head`, closes the pipe.

    Characters that the terminal's encoding lacks are printed as escape sequences.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    escape_warnings()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for data, also when a verb loads vLLM
    try:
        run_in_child(sys.argv[1:])
    except ConfigError as error:
        sys.exit(_complain(str(error), WRONG))
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at exit
        code = FAILED
    sys.exit(code)


def _help() -> str:
    lines = [f"  {verb:<11} {what}" for verb, what in VERBS.items()]
    return "\n".join(
        [
            "usage: trustrl <verb> ...",
            "",
            "Trust regions for LLM reinforcement learning: one recipe, any engine.",
            "",
            *lines,
            "",
            "Run `trustrl <verb> --help` for details. Exit codes: 0 success, 1 failure or finding, 2 wrong usage.",
        ]
    )


def _complain(message: str, code: int) -> int:
    complain(f"error: {message}")
    return code
