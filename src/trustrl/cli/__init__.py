"""The command `trustrl`: one file per verb, imported when called, so that `--help` is instant.

Exit codes: 0 ok, 1 something failed or was found, 2 wrong usage or a setting that does not fit.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from trustrl.errors import ConfigError, TrustRLError, UnknownNameError

VERBS = {
    "recipes": "the recipes that come with trustrl; one of them, to start your own from",
    "plan": "what a recipe amounts to: roles, counts, memory, cost and the engine's own settings",
    "run": "trains a recipe in a folder of its own, or goes on with it",
    "compare": "trains regions × seeds and writes a table and pictures",
    "report": "what runs did, token by token: in the terminal or as one page that needs no network",
    "explain": "why a run went wrong: ranked causes with the numbers behind each, or nothing found",
    "metrics": "what a logged number means, when it is healthy and what to do",
    "conformance": "what a policy loss does with small batches that have known answers",
    "doctor": "whether this machine is fit for a run: versions, ports, settings, threads, disk",
    "probe": "the same tokens through sampler and trainer: how far apart, and why",
    "audit": "what other regions would have stopped, on recorded tokens",
    "calibrate": "the noise between sampler and trainer in records, and the threshold that leaves it alone",
}
GOES_ON = {"run": "the same command with --resume goes on", "compare": "the same command goes on"}
"""What an interrupted verb that trains has kept; the others are started again."""

OK, FAILED, WRONG = 0, 1, 2


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb."""
    parser = argparse.ArgumentParser(prog=f"trustrl {verb}", description=f"{VERBS[verb]}.")
    import_module(f"trustrl.cli.{verb}").add_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code; errors of ours are sentences, not tracebacks."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if given else sys.stderr)
        return OK if given else WRONG
    if given[0] == "--version":
        import trustrl

        print(trustrl.__version__)
        return OK
    verb, *rest = given
    if verb not in VERBS:
        from trustrl.registry import nearest

        return _complain(f"There is no `trustrl {verb}`.{nearest(verb, list(VERBS))} Known: {', '.join(VERBS)}.", WRONG)
    try:
        options = parser_of(verb).parse_intermixed_args(rest)
    except SystemExit as ended:  # argparse has said why
        return int(ended.code or 0)
    try:
        return import_module(f"trustrl.cli.{verb}").run(options)
    except (ConfigError, UnknownNameError) as error:
        return _complain(str(error), WRONG)
    except TrustRLError as error:
        return _complain(str(error), FAILED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or verb in GOES_ON:  # of a training run the traceback is wanted
            raise
        return _complain(f"{str(error).rstrip('.')}.", FAILED)
    except KeyboardInterrupt:
        return _complain(f"interrupted; {GOES_ON[verb]}." if verb in GOES_ON else "interrupted.", FAILED)


def console() -> None:
    """The console script. A reader that has seen enough, such as `head`, ends it without a word.

    Signs that the terminal's encoding does not have are written out.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # wherever vLLM is loaded: stdout is for data
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be written at exit
        code = FAILED
    sys.exit(code)


def _help() -> str:
    lines = [f"  {verb:<11} {what}" for verb, what in VERBS.items()]
    return "\n".join(
        [
            "trustrl <verb> ...: trust regions for LLM reinforcement learning, one recipe on any engine",
            "",
            *lines,
            "",
            "`trustrl <verb> --help` says more. Exit codes: 0 ok, 1 failed or found, 2 wrong usage.",
        ]
    )


def _complain(sentence: str, code: int) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return code
