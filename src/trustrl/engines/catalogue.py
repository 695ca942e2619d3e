"""The engines that trustrl runs in: the regions that each supports, its log-probs, and its tests.

Loads without torch and without any engine. `tools/engine_tables.py` writes docs/engines/index.md from it.
"""

from dataclasses import dataclass
from typing import Literal

from trustrl.config.axes import Region
from trustrl.config.statistics import Anchor

Kind = Literal["sampled", "topk", "exact", "projection"]
"""The part of the vocabulary that a region reads: the sampled token, the K most probable ids, or all of it; or a region
that replaces the distribution (TROLL)."""

Tested = Literal["run", "called", "signature"]

TESTED: dict[Tested, str] = {
    "run": "trains in our tests",
    "called": "loss called in our tests",
    "signature": "signature checked, not run",
}
"""The label of each kind of test. "Trains": the engine's own trainer took optimizer steps with a region. "Called": the
installed package's own entry point called our loss, and verdicts and gradients were compared."""

SAMPLED: frozenset[Kind] = frozenset({"sampled"})
ALL: frozenset[Kind] = frozenset({"sampled", "topk", "exact", "projection"})
BOTH: frozenset[Anchor] = frozenset({"behavior", "proximal"})


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

    tested: Tested
    session: str
    """The nox session of its tests."""

    page: str
    """The page in docs/engines."""


def kind_of(region: Region) -> Kind:
    """Returns the part of the vocabulary that a region reads."""
    needs = region.needs()
    if region.kind == "troll":
        return "projection"
    return "topk" if needs.topk else "exact" if needs.full else "sampled"


def supports(engine: Engine, region: Region) -> bool:
    """Returns whether an engine can feed a region. Its settings may still refuse it; see the engine's page."""
    return kind_of(region) in engine.kinds and region.needs().anchors <= engine.anchors


ENGINES = (
    Engine(
        name="TRL",
        package="trl",
        versions=("1.16.0", "1.15.0", "1.9.0", "1.0.0"),
        module="trustrl.engines.trl",
        start='TrustRegionGRPOTrainer(..., region=trustrl.preset("dppo-binary-tv"))',
        kinds=ALL,
        tested="run",
        session="trl",
        page="trl.md",
    ),
    Engine(
        name="verl",
        package="verl",
        versions=("0.9.1", "0.9.0"),
        module="trustrl.engines.verl",
        start="python -m trustrl.engines.verl actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-dppo-binary-tv",
        kinds=ALL,
        tested="run",
        session="verl",
        page="verl.md",
    ),
    Engine(
        name="SkyRL",
        package="skyrl",
        versions=("0.3.0",),
        module="trustrl.engines.skyrl",
        start="python -m trustrl.engines.skyrl trainer.algorithm.policy_loss_type=trustrl-dppo-binary-tv",
        tested="called",
        session="skyrl",
        page="skyrl.md",
    ),
)
"""Every engine, in the order of the page."""
