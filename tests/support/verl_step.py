"""One training step of a real verl worker on a batch of the oracle, and everything that is compared with it."""

from functools import partial

import numpy as np
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import moe_oracle, regions_oracle as oracle, verl_world as world
from trustrl.engines.common.sampler_fields import KEPT_COUNTS, KEPT_IDS
from trustrl.engines.verl import anchors, losses


def as_verl_carries(batch, **meta):
    """Nested responses, as they come out of verl's queue."""
    lengths = batch.in_sequence.sum(-1).tolist()
    rows = range(len(lengths))

    def nested(x):
        return torch.nested.as_nested_tensor([x[row, : lengths[row]] for row in rows], layout=torch.jagged)

    ids = [torch.cat([batch.prompts[row], batch.responses[row, : lengths[row]]]) for row in rows]
    tensors = {
        "prompts": torch.nested.as_nested_tensor(list(batch.prompts), layout=torch.jagged),
        "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor([torch.arange(len(x)) for x in ids], layout=torch.jagged),
        "responses": nested(batch.responses),
        "response_mask": nested(batch.in_loss.long()),
        "loss_mask": nested(batch.in_loss.long()),
        "advantages": nested(batch.advantages),
        "rollout_log_probs": nested(batch.behavior_logp),
        "old_log_probs": nested(batch.behavior_logp if meta.pop("bypass", False) else batch.proximal_logp),
        "ref_log_prob": nested(batch.reference_logp),
        "teacher_ids": nested(batch.behavior_top_ids),
        "teacher_logprobs": nested(batch.behavior_top_logp),
    }
    if batch.kept is not None:
        tensors["extra_fields"] = [_kept_fields(batch.kept[row, : lengths[row]]) for row in rows]
    usual = {"temperature": oracle.TEMPERATURE, "calculate_entropy": False}
    return tu.get_tensordict(tensors, non_tensor_dict=usual | meta)


def with_random_routes(routed_natively):
    """Returns `as_verl_carries` with routes to replay, which the oracle follows unless it is `routed_natively`."""
    routes = moe_oracle.random_routes()
    if not routed_natively:
        moe_oracle.follow(routes)

    def carried(batch, **meta):
        data = as_verl_carries(batch, **meta)
        lengths = data["input_ids"].offsets().diff().tolist()
        rows = [routes[row, :length] for row, length in enumerate(lengths)]
        data["routed_experts"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tu.assign_non_tensor(data, enable_routing_replay=True)
        return data

    return carried


def _kept_fields(kept):
    ids = [row.nonzero().squeeze(-1) for row in kept]
    return {KEPT_IDS: torch.cat(ids).int().numpy(), KEPT_COUNTS: np.array([len(row) for row in ids], np.int32)}


def gradient_of(worker, region, batch, mode, *, gradient, carried=as_verl_carries, **more):
    """One optimiser step at learning rate 0, and the gradient it would have used: `gradient(engine)` before it."""
    settings = {"region": trustrl.config_to_dict(region), "startup_checks": False}
    if batch.kept is not None:
        settings["max_kept"] = oracle.VOCABULARY
    meta = {key: more.pop(key) for key in ("bypass", "calculate_entropy") if key in more}
    config = world.actor("trustrl", loss_agg_mode=mode, policy_loss=settings, **more)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    kept = []
    step = type(worker.engine).optimizer_step

    def watched():
        kept.append(gradient(worker.engine))
        return step(worker.engine)

    worker.engine.optimizer_step = watched
    keep, weight = [], []
    decide = losses.policy_loss

    def seen(policy, rollout, *args, **kwargs):
        out = decide(policy, rollout, *args, **kwargs)
        keep.extend(out.decision.keep[rollout.in_loss].tolist())
        weight.extend(out.decision.weight[rollout.in_loss].tolist())
        return out

    losses.policy_loss = seen
    record, fields = anchors.record, {}

    def recorded(*args, **kwargs):
        fields.update(record(*args, **kwargs))
        return dict(fields)

    anchors.record = recorded
    rows = len(batch.prompts) * worker.engine.get_data_parallel_size()
    out = worker.train_mini_batch(
        carried(
            batch, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0,
            dataloader_kwargs={"shuffle": False}, **meta,
        )
    )  # fmt: skip
    losses.policy_loss, anchors.record = decide, record
    (found,) = kept
    num_tokens = int(batch.in_sequence.sum())
    num_bytes = sum(x.values().nbytes for x in fields.values()) / num_tokens
    metrics = {} if out is None else dict(tu.get(out, "metrics"))  # one rank of a model has verl's answer
    return {"gradient": found, "metrics": metrics, "keep": keep, "weight": weight, "bytes_per_token": num_bytes}
