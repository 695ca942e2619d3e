"""A read of the vocabulary beside an engine's own logits, inside the model's forward."""

import copy

import pytest

pytest.importorskip("trl")

import torch
import torch.distributed as dist

from support import trl_world as world
from support.fsdp2_shardings import RESHARDED, SHARDINGS, shard, whole
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import AskingModel, LogitsForward
from trustrl.engines.common.vocabulary_read import at_completions
from trustrl.errors import ConfigError, EngineError

K, TEMPERATURE = 5, 0.7


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of one process."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def request(ids, length=4):
    """A request that reads the last tokens."""
    where = TokenPlaces.of_mask(torch.ones(len(ids), length, dtype=torch.bool))
    return at_completions(ids, where, temperature=TEMPERATURE, top_k=K)


def asked(model, ids):
    """The output of a pass that reads the last tokens."""
    asking = AskingModel(model, request(ids))
    output = asking(input_ids=ids)
    assert asking.outputs == [output]
    return output


def token_ids(model):
    return torch.randint(model.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))


def test_the_logits_are_the_models_own_and_the_vocabulary_is_theirs():
    model = world.tiny_model()
    ids = token_ids(model)
    wanted = model(input_ids=ids).logits
    LogitsForward(model, float32_head=False)
    output = asked(model, ids)
    assert torch.equal(output.logits, wanted)
    logp = (wanted[:, -5:-1] / TEMPERATURE).log_softmax(-1).flatten(0, 1)
    sampled = logp.gather(-1, ids[:, -4:].reshape(-1, 1))[:, 0]
    torch.testing.assert_close(output.log_probs, sampled, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.topk_logp, logp.gather(-1, output.topk_ids), rtol=0, atol=1e-5)
    plain = model(input_ids=ids)  # without a request, the output is the model's own
    assert not hasattr(plain, "topk_logp")


def test_an_adapter_on_the_output_layer_is_refused_before_the_first_pass():
    """ms-swift, OpenRLHF and SkyRL read the layer's weight, which lacks what the adapter adds."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(world.tiny_model(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=r"output layer must be a plain linear layer.*target_modules"):
        LogitsForward(model.get_base_model(), float32_head=False)


def test_logits_divided_in_place_leave_the_vocabulary_alone():
    model = world.tiny_model()
    ids = token_ids(model)
    LogitsForward(model, float32_head=False)
    output = asked(model, ids)
    before = output.topk_logp.detach().clone()
    output.logits[:, :-1].div_(TEMPERATURE)
    assert torch.equal(output.topk_logp, before)
    (output.topk_logp.sum() + output.logits.sum()).backward()
    assert model.lm_head.weight.grad.isfinite().all()


@pytest.mark.parametrize("sharding", [*SHARDINGS, RESHARDED])
def test_a_sharded_model_has_the_gradients_of_the_whole_model(one_rank, sharding):
    model = world.tiny_model()
    ids = token_ids(model)
    sharded = copy.deepcopy(model)
    shard(sharded, sharding, 1)
    gradients = []
    for one in (model, sharded):
        LogitsForward(one, float32_head=False)
        output = asked(one, ids)
        (output.topk_logp.exp().sum() + output.log_probs.sum()).backward()
        gradients.append({name: whole(p.grad) for name, p in one.named_parameters()})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sharding", [*SHARDINGS, RESHARDED])
def test_a_pending_request_has_the_values_and_gradients_of_the_keyword(one_rank, sharding):
    model = world.tiny_model()
    ids = token_ids(model)
    gradients, outputs = [], []
    for pending in (False, True):
        sharded = copy.deepcopy(model)
        shard(sharded, sharding, 1)
        forward = LogitsForward(sharded, float32_head=False)
        if pending:
            with forward.pending(request(ids)) as passes:
                returned = sharded(input_ids=ids)  # the engine's own call
            (output,) = passes
            assert torch.equal(returned.logits, output.logits)
        else:
            output = asked(sharded, ids)
        (output.topk_logp.exp().sum() + output.log_probs.sum()).backward()
        gradients.append({name: whole(p.grad) for name, p in sharded.named_parameters()})
        outputs.append(output)
    assert not hasattr(sharded(input_ids=ids), "topk_logp")  # the context is over
    assert torch.equal(outputs[1].topk_logp, outputs[0].topk_logp)
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("calls", [0, 2])
def test_a_pending_request_that_is_not_answered_once_is_refused(calls):
    model = world.tiny_model()
    ids = token_ids(model)
    forward = LogitsForward(model, float32_head=False)
    refused = pytest.raises(EngineError, match=f"call the model once for each micro-batch, got {calls} calls")
    with refused, forward.pending(request(ids)):
        for _ in range(calls):
            model(input_ids=ids)
    assert not hasattr(model(input_ids=ids), "topk_logp")


def test_a_model_that_skips_its_output_layer_is_refused():
    model = world.tiny_model()
    model.forward = lambda **inputs: model.base_model(**inputs)
    LogitsForward(model, float32_head=False)
    with pytest.raises(EngineError, match="must call its output layer once in a forward pass, got 0 calls"):
        asked(model, token_ids(model))
