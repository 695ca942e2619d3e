"""The oracle's sequences as prime-rl's orchestrator sends them, packed for its trainer."""

import numpy as np
from prime_rl.trainer import batch as packing
from prime_rl.transports.rollouts.types import RoutedExperts, TrainingSample

from support import regions_oracle as oracle
from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.prime_rl.sampled_topk import table_of

LENGTH = 40
"""Largest number of tokens of a micro-batch."""


def samples(model, table=table_of):
    """The oracle's sequences, with a table of the sampler's top K unless `table` returns none."""
    part = oracle.batch(model, 0)
    for row in range(oracle.ROWS):
        length = int(part.in_sequence[row].sum())
        tokens, sampled = part.responses[row, :length], slice(0, length)
        record = SampledRecord(
            tokens=tokens.numpy().astype(np.int32), logp=part.behavior_logp[row, sampled].numpy(),
            topk_ids=part.behavior_top_ids[row, sampled].numpy(), topk_logp=part.behavior_top_logp[row, sampled].numpy(),
        )  # fmt: skip
        rows = table(record, oracle.PROMPT)
        count = oracle.PROMPT + length
        yield TrainingSample(
            token_ids=[*part.prompts[row].tolist(), *tokens.tolist()],
            mask=[False] * oracle.PROMPT + part.in_loss[row, sampled].tolist(),
            logprobs=[0.0] * oracle.PROMPT + part.behavior_logp[row, sampled].tolist(),
            temperatures=[oracle.TEMPERATURE] * count, env_name="test",
            advantages=[0.0] * oracle.PROMPT + part.advantages[row, sampled].tolist(),
            routed_experts=None if rows is None else RoutedExperts(rows.tobytes(), list(rows.shape), str(rows.dtype)),
        )  # fmt: skip


def packed(samples, ranks=1):
    """prime-rl's micro-batches of each rank."""
    cost = packing.build_bin_cost(None)
    return packing.prepare_batch(
        list(samples), seq_len=LENGTH, num_train_workers=ranks, bin_cost=cost, pad_to_multiple_of=8
    )
