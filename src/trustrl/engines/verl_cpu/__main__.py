"""`python -m trustrl.engines.verl_cpu ...`: `python -m trustrl.engines.verl` with the defaults a CPU needs."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from trustrl.engines.verl_cpu.defaults import ENVIRONMENT, PLAIN_PROMPTS, PLUGIN, with_defaults

PLAIN = "--plain-prompts"
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
HELP = """\
python -m trustrl.engines.verl_cpu <setting>=<value> ...

verl's main_ppo without a GPU. Takes all of main_ppo's settings; what a CPU needs is set unless you set it. You say:

  data.train_files=train.parquet data.val_files=held_out.parquet
  actor_rollout_ref.model.path=<folder>
  actor_rollout_ref.rollout.name=transformers_cpu, or vllm_cpu with TRUSTRL_VLLM_PYTHON=<its environment>/bin/python
  actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-dppo-binary-tv
  trainer.total_training_steps=30
  trainer.n_gpus_per_node=2                      ranks (1)
  --plain-prompts                                for a model of texts: no chat template around a prompt

`python -m trustrl.engines.verl_data --help` writes data files. --defaults prints every default.
`--cfg job` prints the whole configuration.
"""


def main(arguments: Sequence[str]) -> None:
    """Sets up the environment and the arguments, and hands over.

    Raises:
        ConfigError: vLLM is asked for and its environment is not named, or as `trustrl.engines.verl` does.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    if "--defaults" in arguments:
        print("\n".join(with_defaults([])))
        return
    complete = with_defaults([PLAIN_PROMPTS if one == PLAIN else one for one in arguments])
    if "actor_rollout_ref.rollout.name=vllm_cpu" in complete:
        given = [one.partition("=")[2] for one in complete if ".engine_kwargs.vllm_cpu.python=" in one]
        import_module("trustrl.engines.verl_cpu.vllm_environment").python_of(given[-1] if given else None)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    others = [name for name in os.environ.get(EXTERNAL, "").split(",") if name and name != PLUGIN]
    os.environ[EXTERNAL] = ",".join([PLUGIN, *others])  # the platform must be known before anybody asks for it
    sys.argv[1:] = complete
    import_module("trustrl.engines.verl.__main__").main()


if __name__ == "__main__":
    main(sys.argv[1:])
