"""The engines that trustrl runs in: the regions that each supports, and its log-probs.

Loads without torch and without any engine. `scripts/engine_tables.py` writes docs/engines/index.md from it and from
`scripts/engine_evidence.py`, which names the tests of each engine.
"""

from dataclasses import dataclass
from typing import Literal

from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor

Kind = Literal["sampled", "topk", "exact", "projection"]
"""The part of the vocabulary that a region reads: the sampled token, the K most probable ids, or all of it; or a region
that differentiates the distribution (TROLL, score centering)."""

SAMPLED: frozenset[Kind] = frozenset({"sampled"})
TOPK: frozenset[Kind] = frozenset({"topk"})
EXACT: frozenset[Kind] = frozenset({"exact"})
PROJECTION: frozenset[Kind] = frozenset({"projection"})
FAMILY: frozenset[Kind] = SAMPLED | TOPK | PROJECTION
ALL: frozenset[Kind] = FAMILY | EXACT
ON_SAMPLER: frozenset[Anchor] = frozenset({"behavior"})
ON_TRAINER: frozenset[Anchor] = frozenset({"proximal"})
BOTH: frozenset[Anchor] = ON_SAMPLER | ON_TRAINER


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One engine."""

    name: str
    package: str
    """The name of the distribution, or of the repository if there is none."""

    versions: tuple[str, ...]
    """The releases or commits that ran our tests, newest first."""

    module: str
    """The module of the adapter."""

    start: str
    """The line that chooses a region."""

    kinds: frozenset[Kind] = SAMPLED
    anchors: frozenset[Anchor] = BOTH
    """The log-probs that the engine passes to a loss: the sampler's record (behavior), or the trainer's own at the
    rollout's weights (proximal)."""

    both_at_once: bool = True
    """False if the engine's settings choose one of the two, so that regions which read both are refused."""

    distribution_of: frozenset[Anchor] = BOTH
    """The anchors of which more than the sampled token can be recorded."""

    sequence_means: bool = True
    """False if the engine cannot average over sequences, as GSPO requires."""

    session: str
    """The nox session of its tests."""

    page: str
    """The page in docs/engines."""


def kind_of(region: Region) -> Kind:
    """Returns the part of the vocabulary that a region reads."""
    needs = region.needs()
    if needs.projects:
        return "projection"
    return "topk" if needs.topk else "exact" if needs.full else "sampled"


def supports(engine: Engine, region: Region) -> bool:
    """Returns whether an engine can feed a region. Its settings may still refuse it; see the engine's page."""
    needs, kind = region.needs(), kind_of(region)
    return (
        kind in engine.kinds
        and needs.anchors <= engine.anchors
        and (kind == "sampled" or needs.anchor in engine.distribution_of)
        and (engine.both_at_once or len(needs.anchors) == 1)
        and (engine.sequence_means or needs.reduction is None)
    )


ENGINES = (
    Engine(
        name="TRL", package="trl", versions=("1.16.0", "1.15.0", "1.9.0", "1.0.0"), module="trustrl.engines.trl",
        kinds=ALL, session="trl", page="trl.md",
        start='TrustRegionGRPOTrainer(..., region=trustrl.preset("dppo-binary-tv-capped"))',
    ),
    Engine(
        name="verl", package="verl", versions=("0.9.1", "0.9.0"), module="trustrl.engines.verl", kinds=ALL,
        session="verl", page="verl.md",
        start="python -m trustrl.engines.verl "
        "actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-dppo-binary-tv-capped",
    ),
    Engine(
        name="SkyRL", package="skyrl", versions=("0.3.0",), module="trustrl.engines.skyrl", kinds=FAMILY,
        distribution_of=ON_TRAINER, session="skyrl", page="skyrl.md",
        start="python -m trustrl.engines.skyrl trainer.algorithm.policy_loss_type=trustrl-dppo-binary-tv-capped",
    ),
    Engine(
        name="ms-swift", package="ms_swift", versions=("4.6.0",), module="trustrl.engines.swift", kinds=FAMILY,
        distribution_of=ON_TRAINER, session="swift", page="swift.md",
        start="TRUSTRL_REGION=dppo-binary-tv-capped swift rlhf --rlhf_type grpo --external_plugins ...",
    ),
    Engine(
        name="axolotl", package="axolotl", versions=("0.19.0",), module="trustrl.engines.axolotl", kinds=FAMILY,
        session="axolotl", page="axolotl.md",
        start="trust_region: dppo-binary-tv-capped",
    ),
    Engine(
        name="OpenRLHF", package="openrlhf", versions=("0.11.2",), module="trustrl.engines.openrlhf", kinds=FAMILY,
        session="openrlhf", page="openrlhf.md",
        start="python -m trustrl.engines.openrlhf --trustrl.region dppo-binary-tv-capped",
    ),
    Engine(
        name="tinker", package="tinker", versions=("0.38.0", "0.36.0"), module="trustrl.engines.tinker",
        session="losses", page="tinker.md",
        start='forward_backward_custom(data, loss_hook(trustrl.preset("dppo-binary-tv-capped")))',
    ),
    Engine(
        name="Trinity-RFT", package="trinity-rft", versions=("0.6.0",), module="trustrl.engines.trinity",
        session="losses", page="trinity.md",
        start="policy_loss_fn: trustrl.engines.trinity.RegionLoss",
    ),
    Engine(
        name="RLinf", package="rlinf", versions=("0.3.0",), module="trustrl.engines.rlinf", both_at_once=False,
        session="losses", page="rlinf.md",
        start="RLINF_EXT_MODULE=trustrl.engines.rlinf ... algorithm.loss_type=trustrl-dppo-binary-tv-capped",
    ),
    Engine(
        name="AReaL", package="areal", versions=("1.0.4",), module="trustrl.engines.areal", sequence_means=False,
        session="losses", page="areal.md",
        start="class Actor(RegionActor, FSDPPPOActor): region = 'dppo-binary-tv-capped'",
    ),
    Engine(
        name="prime-rl", package="PrimeIntellect-ai/prime-rl", versions=("commit 559b447",),
        module="trustrl.engines.prime_rl", kinds=FAMILY, anchors=ON_SAMPLER, sequence_means=False, session="prime_rl",
        page="prime-rl.md",
        start='[trainer.loss] type="custom" import_path="trustrl.engines.prime_rl.region_loss"',
    ),
    Engine(
        name="NeMo RL", package="NVIDIA-NeMo/RL", versions=("commit 7ea279a",), module="trustrl.engines.nemo_rl",
        session="sources", page="nemo-rl.md",
        start="loss_fn = with_region(loss_fn, master_config)",
    ),
    Engine(
        name="slime", package="THUDM/slime", versions=("commit 624b824",), module="trustrl.engines.slime",
        session="sources", page="slime.md",
        start="--loss-type custom_loss --custom-loss-function-path trustrl.engines.slime.region_loss",
    ),
    Engine(
        name="miles", package="radixark/miles", versions=("commit 31f1ca9",), module="trustrl.engines.miles",
        session="sources", page="slime.md",
        start="--loss-type custom_loss --custom-loss-function-path trustrl.engines.miles.region_loss",
    ),
)  # fmt: skip
"""Every engine, in the order of the page."""
