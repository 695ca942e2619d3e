"""The tests of regions in each engine, by sampler, kind of region, and anchor.

An `Evidence` makes cells of docs/engines/index.md: "trains" if the engine's own trainer took optimizer steps in the
test, "called" if the installed package's own entry point called our loss, and verdicts and gradients were compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trustrl.config.statistics import Anchor
from trustrl.engines.catalogue import (
    ALL,
    BOTH,
    EXACT,
    FAMILY,
    ON_SAMPLER,
    ON_TRAINER,
    PROJECTION,
    SAMPLED,
    TOPK,
    Engine,
    Kind,
)  # fmt: skip

Tested = Literal["run", "called"]

TESTED: dict[Tested, str] = {"run": "trains", "called": "called"}
"""The label of each kind of test."""

Status = Literal["trains", "called", "refused", "not run"]

Sampler = Literal["vLLM", "SGLang", "trainer", "transformers server", "recorded batch"]
"""The program that sampled in a test. "Trainer": the trainer's own model, so that μ is π'. "Transformers server": that
of trustrl-verl-cpu. "Recorded batch": log-probs made by hand, through the engine's own worker or loss."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Regions that ran in an engine with one sampler, and the test that shows it."""

    sampler: Sampler
    kinds: frozenset[Kind]
    anchors: frozenset[Anchor]
    test: str
    """The test's file in tests/, and its name."""

    tested: Tested = "run"


def _called(test: str, kinds: frozenset[Kind] = SAMPLED) -> Evidence:
    """Returns the row of a test that calls the package's own entry point with log-probs made by hand."""
    return Evidence("recorded batch", kinds, BOTH, test, "called")


_RESPONSES = "support/response_contract.py::test_a_preset_has_the_files_verdicts_and_gradient"
"""The test of slime and of its fork miles, whose test files import it."""

EVIDENCE: Mapping[str, tuple[Evidence, ...]] = {
    "TRL": (
        Evidence("trainer", ALL, ON_SAMPLER, "engines/trl/test_presets.py"
                 "::test_every_preset_trains_with_finite_losses_gradients_and_weights"),
        Evidence("trainer", SAMPLED | PROJECTION, ON_TRAINER, "engines/trl/test_presets.py"
                 "::test_every_preset_acts_on_later_updates"),
        Evidence("vLLM", FAMILY, ON_SAMPLER, "engines/trl_vllm/test_regions.py"
                 "::test_what_is_recorded_is_the_distribution_that_sampled"),
        Evidence("vLLM", SAMPLED | TOPK | EXACT, ON_TRAINER, "engines/trl_vllm/test_regions.py"
                 "::test_what_is_recorded_is_the_distribution_that_sampled"),
        Evidence("SGLang", TOPK | PROJECTION, ON_SAMPLER, "engines/sglang/test_trl_run.py"
                 "::test_tokens_of_the_trainers_own_weights_have_ratio_1_and_older_ones_are_counted"),
    ),
    "verl": (
        Evidence("vLLM", SAMPLED | TOPK, ON_SAMPLER, "engines/verl_cpu/test_run.py"
                 "::test_every_step_begins_with_the_policy_that_sampled"),
        Evidence("SGLang", TOPK | PROJECTION, ON_SAMPLER, "engines/sglang/test_verl_run.py"
                 "::test_the_sampler_follows_the_trainer_and_the_reward_rises"),
        Evidence("transformers server", PROJECTION, ON_TRAINER, "engines/verl_cpu/test_run.py"
                 "::test_every_step_begins_with_the_policy_that_sampled"),
        Evidence("recorded batch", FAMILY, BOTH, "engines/verl/test_regions.py"
                 "::test_a_worker_trains_with_every_kind_of_region"),
        Evidence("recorded batch", EXACT, ON_TRAINER, "engines/verl/test_regions.py"
                 "::test_a_worker_trains_with_every_kind_of_region"),
    ),
    "SkyRL": (
        _called("engines/skyrl/test_worker.py"
                "::test_skyrls_workers_reach_the_agreed_verdicts_and_the_whole_batchs_gradient"),
        Evidence("recorded batch", TOPK | PROJECTION, ON_TRAINER, "engines/skyrl/test_vocabulary.py"
                 "::test_skyrls_own_training_step_takes_an_optimizer_step_with_the_norm_of_a_direct_gradient"),
    ),
    "ms-swift": (
        Evidence("trainer", SAMPLED | TOPK, ON_SAMPLER, "engines/swift/test_run.py"
                 "::test_swift_rlhf_trains_with_a_region_from_its_command_line"),
        Evidence("trainer", PROJECTION, ON_TRAINER, "engines/swift/test_run.py"
                 "::test_swift_rlhf_trains_with_a_region_from_its_command_line"),
        _called("engines/swift/test_parity.py::test_a_preset_has_the_files_gradients_with_a_fake_model"),
    ),
    "axolotl": (
        Evidence("trainer", SAMPLED, ON_SAMPLER, "engines/axolotl/test_run.py::test_a_yaml_file_trains_with_a_region"),
        Evidence("trainer", TOPK, ON_SAMPLER, "engines/axolotl/test_run.py"
                 "::test_a_yaml_file_trains_with_a_region_on_more_of_the_vocabulary"),
        Evidence("trainer", PROJECTION, ON_TRAINER, "engines/axolotl/test_run.py"
                 "::test_a_yaml_file_trains_with_a_region_on_more_of_the_vocabulary"),
        _called("engines/axolotl/test_parity.py"
                "::test_each_preset_has_the_oracles_gradient_and_verdicts_in_axolotls_trainer"),
        _called("engines/axolotl/test_vocabulary.py"
                "::test_axolotls_trainer_has_the_gradient_of_whole_log_softmaxes", TOPK | PROJECTION),
    ),
    "OpenRLHF": (
        Evidence("vLLM", SAMPLED, ON_SAMPLER, "engines/openrlhf/test_run.py"
                 "::test_a_run_on_ray_with_stubs_for_cuda_trains_and_keeps_the_sampler_in_step"),
        Evidence("vLLM", TOPK | PROJECTION, ON_TRAINER, "engines/openrlhf/test_run.py"
                 "::test_a_top_k_and_a_troll_run_on_ray_with_stubs_for_cuda_train_and_log_every_step"),
        Evidence("recorded batch", TOPK | PROJECTION, BOTH, "engines/openrlhf/test_vocabulary.py"
                 "::test_an_update_with_deepspeed_has_the_gradient_of_whole_log_softmaxes_with_plain_calls_for_ray"),
        _called("engines/openrlhf/test_losses.py"
                "::test_a_preset_in_openrlhfs_training_step_on_a_stub_network_has_the_parity_files_gradients"),
    ),
    "tinker": (
        _called("engines/tinker/test_tinker.py"
                "::test_the_hook_in_tinkers_own_client_sends_the_oracles_gradient_with_a_fake_service"),
    ),
    "Trinity-RFT": (
        _called("engines/trinity/test_trinity.py"
                "::test_a_region_with_both_anchors_has_the_oracles_verdicts_and_gradient"),
    ),
    "RLinf": (
        _called("engines/rlinf/test_rlinf.py::test_a_region_has_the_oracles_verdicts_and_gradient"),
    ),
    "AReaL": (
        _called("engines/areal/test_areal.py"
                "::test_a_region_in_areals_actor_has_the_oracles_verdicts_and_gradient_with_a_fake_engine"),
    ),
    "prime-rl": (
        Evidence("recorded batch", FAMILY, ON_SAMPLER, "engines/prime_rl/test_trainer.py"
                 "::test_prime_rls_trainer_takes_an_optimizer_step_with_the_clipped_gradient_of_a_direct_computation"),
    ),
    "NeMo RL": (
        _called("engines/nemo_rl/test_nemo_rl.py::test_a_preset_has_the_files_verdicts_and_gradient"),
    ),
    "slime": (_called(_RESPONSES),),
    "miles": (_called(_RESPONSES),),
}  # fmt: skip
"""The tests of each engine, by its name in the catalogue. A sampler appears in the table with its first line here."""


def strongest_test(engine: Engine) -> Tested:
    """Returns the strongest kind of test."""
    return "run" if any(row.tested == "run" for row in EVIDENCE[engine.name]) else "called"


def samplers_of(engine: Engine) -> tuple[Sampler, ...]:
    """Returns the samplers that its tests ran with."""
    return tuple(dict.fromkeys(row.sampler for row in EVIDENCE[engine.name]))


def status(engine: Engine, kind: Kind, sampler: Sampler, anchor: Anchor) -> Status:
    """Returns the result of regions of one kind, with one sampler and anchored on one policy."""
    rows = [
        row for row in EVIDENCE[engine.name] if row.sampler == sampler and kind in row.kinds and anchor in row.anchors
    ]
    if rows:
        return "trains" if any(row.tested == "run" for row in rows) else "called"
    # Where the trainer samples, μ's distribution is its own. Exact divergences need its hidden states.
    read = ON_TRAINER if kind == "exact" else engine.distribution_of
    recorded = kind == "sampled" or anchor in read or sampler == "trainer"
    return "not run" if kind in engine.kinds and anchor in engine.anchors and recorded else "refused"


def trains(engine: Engine, kind: Kind) -> bool:
    """Returns whether regions of this kind took optimizer steps, with any sampler and anchor."""
    return any(kind in row.kinds for row in EVIDENCE[engine.name] if row.tested == "run")
