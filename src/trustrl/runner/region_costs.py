"""Costs of regions on verl with one layout: memory, and bytes between the ranks that share the vocabulary.

N: tokens of a micro-batch on a rank, K: ids that the region reads, D: hidden size, V: vocabulary ids on a rank, w:
bytes of a weight in the forward pass. Sizes are estimates for a rank of the last pipeline stage, the only one with the
output layer.

    vocabulary pass ≈ w V D + N ((4 + w) D + 31 K) + buffer
    buffer, on a CPU: 1,024 × 4,096 w   (+ 4 · 4,096 D beyond 1,024 tokens)
    buffer, on a GPU: max(64 MB, w N V / 16) + w N D

The first line is the fit of docs/vocabulary-cost.md, measured on a CPU in bfloat16: the gradients of the output layer
and of the hidden states. In float32 its second term is N (4 D + 31 K). On a CPU the buffer is a tile of logits, and
exact divergences use two. On a GPU it is the Triton pass's slice of their gradient and its copy of the hidden states,
counted in docs/guides/vocabulary.md.

    loss ≈ C (b K + 100)   for K > 0,   150 C   for regions on the sampled token

C is the number of completion tokens of a micro-batch, on every rank that shares them. b depends on the region; this is
what the eager steps hold, and a test measures it.

    sent per token = 4 (K + 3) + 12 T + 8 E   forward,   4 D   backward

T is the number of the policy's own most probable ids, E is 1 for exact divergences. Megatron's sequence parallelism
sums the hidden states' gradient itself, so the region sends nothing backward.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from trustrl.config.axes import Needs, Region
from trustrl.regions.presets import preset
from trustrl.regions.recommended import SAMPLED_TOKEN, TOP_K
from trustrl.runner.layout import Layout
from trustrl.runner.model_shape import BYTES, Shape
from trustrl.runner.policy_roles import roles
from trustrl.runner.recipe import Recipe
from trustrl.runner.verl_command import MAX_TOKENS, computed_dtype, engine_settings

TILE_ROWS, TILE_COLUMNS = 1024, 4096
"""Block sizes of the chunked pass on a CPU. `trustrl.kernels.chunked_pass` needs torch; a test compares them."""

SLICE_BYTES, SLICES = 64 * 2**20, 16
"""Smallest slice of the Triton pass, and the largest number of slices. A test compares them too."""

BYTES_PER_ID = 31
"""Bytes that the pass holds for each token and given id (fitted, docs/vocabulary-cost.md)."""

LOSS_BYTES_PER_ID = {"topk-tv": 41, "troll": 57, "topk-kl": 72}
"""Peak bytes that region and loss hold for each token and id. TROLL's double if every token is outside its ball. Other
regions are taken to hold the most."""

LOSS_BYTES = 100
"""The same for each token, whatever K is."""

SAMPLED_LOSS_BYTES = 150
"""The same for regions on the sampled token: most hold 130 to 161, KPop 301."""

PADDED_BYTES = {"trl": 82, "verl": 25}
"""Bytes for each sequence and position that engines pad: ids, masks, log-probs (docs/cost.md). TRL's is rough."""

DYNAMIC_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens in one of verl's micro-batches on a rank if the recipe sets no micro-batch."""

COMPARED = {
    SAMPLED_TOKEN: preset(SAMPLED_TOKEN),
    TOP_K: preset(TOP_K),
    "troll": preset("troll"),
    "dppo-full-tv, proximal": preset("dppo-full-tv", anchor="proximal"),
}
"""Regions that stand for the sampled token, a Top-K of the sampler, one of the trainer, and exact divergences."""


@dataclass(frozen=True, slots=True)
class RegionCost:
    """Cost of one region. None stands for an unknown size."""

    region: str
    """Name of the region, or the kind of the recipe's region."""

    chosen: bool
    """True for the recipe's own region."""

    record_bytes_per_token: int | None
    """Bytes that each rank keeps for a completion token of its replica."""

    record_bytes: int | None
    """The same for a whole batch."""

    vocabulary_pass_bytes: int | None
    """Bytes that one pass over the vocabulary holds; 0 if the region uses verl's own log-probs."""

    loss_bytes: int
    """Bytes that region and loss hold for the completion tokens of a micro-batch."""

    output_layer_copy_bytes: int | None
    """Bytes of the rank's part of the rollout weights' output layer, for exact divergences."""

    anchor_sends_per_token: int
    """Bytes that a rank contributes per token to the anchor's pass, once for each batch."""

    update_sends_per_token: int | None
    """Bytes that a rank contributes per token to the passes of an update, forward and backward."""

    sends_per_step: int | None
    """Bytes that a rank contributes per step, with the anchor's pass spread over the updates of a batch."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the cost as plain data."""
        return asdict(self)


def region_costs(recipe: Recipe, layout: Layout, shape: Shape) -> list[RegionCost]:
    """Returns the cost of the recipe's region, and of one region of each kind."""
    known = recipe.region in COMPARED.values()
    regions = [*([] if known else [(recipe.region.kind, recipe.region)]), *COMPARED.items()]
    return [
        region_cost(replace(recipe, region=region), name, layout, shape, chosen=region == recipe.region)
        for name, region in regions
    ]


def region_cost(recipe: Recipe, name: str, layout: Layout, shape: Shape, *, chosen: bool) -> RegionCost:
    """Returns the cost of the recipe's region, under a name."""
    needs, schedule = recipe.region.needs(), recipe.schedule
    replicas = layout.replicas(recipe.engine.ranks)
    sequences = schedule.sequences_per_step // replicas
    step_tokens = schedule.completion_tokens(sequences)
    batch_tokens = schedule.completion_tokens(sequences * (schedule.prompts_per_batch // schedule.prompts_per_step))
    per_token = roles(recipe, shape.hidden_size).record_bytes
    anchor, update = _sent(needs, layout, shape.hidden_size)
    # Ranks that share a sequence send only their part of it, but each of them keeps the records of all of it.
    sent = None if update is None else update * step_tokens + anchor * batch_tokens // schedule.updates_per_batch
    return RegionCost(
        region=name,
        chosen=chosen,
        record_bytes_per_token=per_token,
        record_bytes=None if per_token is None else per_token * batch_tokens,
        vocabulary_pass_bytes=vocabulary_pass(recipe, layout, shape),
        loss_bytes=loss_bytes_per_token(recipe.region) * loss_tokens(recipe, layout),
        output_layer_copy_bytes=_head(layout, shape, BYTES[recipe.model.dtype]) if needs.full else 0,
        anchor_sends_per_token=anchor,
        update_sends_per_token=update,
        sends_per_step=None if sent is None else sent // layout.sequence_ranks,
    )


def micro_batch_tokens(recipe: Recipe, layout: Layout) -> int:
    """Returns the largest number of tokens, prompts included, that a rank holds in one forward pass."""
    schedule, sequences = recipe.schedule, _sequences(recipe, layout)
    tokens = sequences * schedule.max_prompt_tokens + schedule.completion_tokens(sequences)
    on_rank = -(-tokens // layout.sequence_ranks)
    return on_rank if _fixed(recipe) else min(on_rank, _largest(recipe, layout))


def loss_tokens(recipe: Recipe, layout: Layout) -> int:
    """Returns the completion tokens whose loss a rank computes at once. Ranks that share a sequence all do."""
    tokens = recipe.schedule.completion_tokens(_sequences(recipe, layout))
    return tokens if _fixed(recipe) else min(tokens, _largest(recipe, layout) * layout.sequence_ranks)


def padded_bytes(recipe: Recipe, layout: Layout) -> int:
    """Returns the bytes of the engine's own numbers that are padded to the longest completion of a micro-batch."""
    schedule, sequences = recipe.schedule, _sequences(recipe, layout)
    if not _fixed(recipe):
        mean = schedule.max_prompt_tokens + (schedule.mean_completion_tokens or schedule.max_completion_tokens)
        sequences = max(1, min(sequences, _largest(recipe, layout) * layout.sequence_ranks // mean))
    return sequences * schedule.max_completion_tokens * PADDED_BYTES[recipe.engine.name]


def loss_bytes_per_token(region: Region) -> int:
    """Returns the peak bytes that region and loss hold for a completion token."""
    num_ids = region.needs().topk
    if not num_ids:
        return SAMPLED_LOSS_BYTES
    kind = getattr(region, "divergence", region).kind
    return LOSS_BYTES_PER_ID.get(kind, max(LOSS_BYTES_PER_ID.values())) * num_ids + LOSS_BYTES


def _sequences(recipe: Recipe, layout: Layout) -> int:
    """Returns the sequences of a rank's micro-batch, or its share of a step if the engine splits that by tokens."""
    return recipe.engine.micro_batch or recipe.schedule.sequences_per_step // layout.replicas(recipe.engine.ranks)


def _fixed(recipe: Recipe) -> bool:
    """Returns whether micro-batches have a fixed number of sequences, and not a limit of tokens."""
    return recipe.engine.micro_batch is not None or recipe.engine.name == "trl"


def _largest(recipe: Recipe, layout: Layout) -> int:
    """Returns verl's limit of tokens on a rank. It must hold the longest sequence: verl stops at a longer one."""
    longest = recipe.schedule.max_prompt_tokens + recipe.schedule.max_completion_tokens
    limit = recipe.engine.micro_batch_tokens or DYNAMIC_TOKENS[recipe.engine.device]
    limit = engine_settings(recipe).get(MAX_TOKENS, limit)
    return max(limit, -(-longest // layout.sequence_ranks))


def vocabulary_pass(recipe: Recipe, layout: Layout, shape: Shape) -> int | None:
    """Returns the bytes that one pass over the vocabulary holds; 0 if the region uses verl's own log-probs."""
    needs = recipe.region.needs()
    if not (needs.topk or needs.full):
        return 0
    width, tokens = BYTES[computed_dtype(recipe)], micro_batch_tokens(recipe, layout)
    head, columns = _head(layout, shape, width), words(layout, shape)
    if head is None or columns is None or shape.hidden_size is None:
        return None
    narrow = width if width < 4 else 0  # the gradient is summed in float32, and then rounded
    per_token = (4 + narrow) * shape.hidden_size + BYTES_PER_ID * needs.topk
    if recipe.engine.device == "cuda":
        buffer = max(SLICE_BYTES, tokens * columns * width // SLICES) + tokens * shape.hidden_size * width
    else:
        buffer = min(tokens, TILE_ROWS) * min(columns, TILE_COLUMNS) * width * (2 if needs.full else 1)
        buffer += 4 * min(columns, TILE_COLUMNS) * shape.hidden_size if tokens > TILE_ROWS else 0
    return head + tokens * per_token + buffer


def words(layout: Layout, shape: Shape) -> int | None:
    """Returns the number of vocabulary ids on a rank of the last stage, without Megatron's padding."""
    return None if shape.vocab_size is None else -(-shape.vocab_size // layout.tensor_parallel)


def _head(layout: Layout, shape: Shape, width: int) -> int | None:
    rows = words(layout, shape)
    return None if rows is None or shape.hidden_size is None else rows * shape.hidden_size * width


def _sent(needs: Needs, layout: Layout, hidden: int | None) -> tuple[int, int | None]:
    """Returns the bytes per token that a rank contributes to the anchor's pass and to an update."""
    if layout.tensor_parallel == 1 or not (needs.topk or needs.full):
        return 0, 0
    anchor = 4 * 3 + 12 * needs.topk if needs.anchor == "proximal" else 0
    own = needs.topk if needs.fills else 0
    forward = 4 * (needs.topk + 3) + 12 * own + (8 if needs.full else 0)
    if layout.sequence_parallel:  # Megatron sums the hidden states' gradient itself
        return anchor, forward
    return anchor, None if hidden is None else forward + 4 * hidden
