"""`python -m trustrl_verl_cpu ...`: `python -m trustrl.engines.verl` with the defaults that a CPU needs."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from trustrl.runner.verl_cpu_settings import PLAIN_PROMPTS, PLUGIN
from trustrl_verl_cpu.cpu_defaults import ENVIRONMENT, MEGATRON_PLUGIN, chooses_megatron, with_defaults

PLAIN = "--plain-prompts"
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
HELP = """\
python -m trustrl_verl_cpu <setting>=<value> ...

Run verl's main_ppo without a GPU. Accepts all of main_ppo's settings, with defaults for a CPU. Set:

  data.train_files=train.parquet data.val_files=held_out.parquet
  actor_rollout_ref.model.path=<folder>
  actor_rollout_ref.rollout.name=transformers_cpu, or vllm_cpu with TRUSTRL_VLLM_PYTHON=<its environment>/bin/python
  actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-dppo-binary-tv-capped
  trainer.total_training_steps=30
  trainer.n_gpus_per_node=2                      ranks (1)
  actor_rollout_ref.actor.strategy=megatron      Megatron instead of FSDP2, with environments/verl-megatron.txt
  --plain-prompts                                no chat template, for a model without one

`python -m trustrl.world.verl_dataset` writes data files. --defaults prints every default.
`--cfg job` prints the whole configuration.
"""


def main(arguments: Sequence[str]) -> None:
    """Sets up the environment and the arguments, and runs `trustrl.engines.verl`.

    Raises:
        ConfigError: If vLLM is the sampler and its environment is not named, or if `trustrl.engines.verl` raises it.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    if "--defaults" in arguments:
        print("\n".join(with_defaults([])))
        return
    complete = with_defaults([PLAIN_PROMPTS if argument == PLAIN else argument for argument in arguments])
    if "actor_rollout_ref.rollout.name=vllm_cpu" in complete:
        pythons = [argument.partition("=")[2] for argument in complete if ".engine_kwargs.vllm_cpu.python=" in argument]
        import_module("trustrl_verl_cpu.vllm_server").python_of(pythons[-1] if pythons else None)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # First, so that the platform is registered before it is used.
    plugins = [PLUGIN, MEGATRON_PLUGIN] if chooses_megatron(complete) else [PLUGIN]
    others = [name for name in os.environ.get(EXTERNAL, "").split(",") if name and name not in plugins]
    os.environ[EXTERNAL] = ",".join([*plugins, *others])
    sys.argv[1:] = complete
    import_module("trustrl.engines.verl.__main__").main()


if __name__ == "__main__":
    main(sys.argv[1:])
