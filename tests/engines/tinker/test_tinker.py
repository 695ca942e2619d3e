"""tinker's own tracing, validation and client code on trustrl's losses; its service is not reachable from tests."""

import asyncio
import inspect
import threading
from types import SimpleNamespace

import pytest
import torch

import trustrl
from support import parity
from trustrl import regions
from trustrl.config.axes import PrefixBudget
from trustrl.engines.tinker import create_loss, input_ranks, loss_hook, traceable_loss, traced_data
from trustrl.errors import ConfigError, MissingDataError, RecordError

types = pytest.importorskip("tinker.types")
custom_loss = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")
training_client = pytest.importorskip("tinker.lib.public_interfaces.training_client")
service_client = pytest.importorskip("tinker.lib.public_interfaces.service_client")

SESSION = "a session"


def average(name):
    return "sequence-mean" if name in parity.PER_SEQUENCE else "token-sum"


def weights(name):
    if name in parity.PER_SEQUENCE:
        return lambda mask: mask.double() / mask.sum(1, keepdim=True)
    return lambda mask: mask.double()


def data_of(batch):
    """One datum for each row; positions outside the loss hold what a prompt holds in tinker's own data: zeros."""
    keep = batch.in_loss
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(range(batch.logp.shape[1]))),
            loss_fn_inputs={
                "target_tokens": list(range(batch.logp.shape[1])),
                "logprobs": torch.where(keep[i], batch.behavior_logp[i], 0.0),
                "proximal_logprobs": torch.where(keep[i], batch.proximal_logp[i], 0.0),
                "advantages": torch.where(keep[i], batch.advantage[i], 0.0),
                "mask": keep[i].float(),
            },
        )
        for i in range(len(keep))
    ]


def traced(name):
    loss = traceable_loss(trustrl.preset(name), average=average(name))
    return custom_loss.trace_loss(loss, input_ranks(loss), SESSION)


@pytest.mark.parametrize("name", [name for name in parity.PRESETS if not trustrl.preset(name).needs().whole_call])
def test_a_loss_that_tinker_traced_has_the_oracles_verdicts_and_gradient(name):
    handle = traced(name)

    def gradient(batch):
        data = traced_data(data_of(batch))
        custom_loss.check_loss_inputs(handle, data)
        rows = [row.detach().clone().requires_grad_(True) for row in batch.logp]
        loss, metrics = custom_loss.run_loss_handle(handle, data, rows)
        loss.backward()
        assert metrics["custom/trustrl/tokens:sum"] == batch.in_loss.sum().item()
        assert metrics["custom/trustrl/dropped_tokens:sum"] == 0
        return torch.stack([row.grad for row in rows])

    parity.check(name, gradient, weights(name))


@pytest.mark.parametrize("name", parity.PRESETS)
def test_a_traced_loss_is_encoded_from_public_torch_functions_for_upload(name):
    graph = custom_loss.encode_graph(traced(name))
    functions = {node.target for node in graph.nodes if node.op == "call_function"}
    methods = {node.target for node in graph.nodes if node.op == "call_method"}
    assert functions, "no function was recorded"
    assert all(target.startswith(("torch.", "operator.")) for target in functions), functions
    # torch.nn.functional.logsigmoid is the one function whose own name is private.
    private = {target for target in functions if ".ops." in target or "._C" in target}
    assert private <= {"torch._C._nn.log_sigmoid"}, private
    assert not [method for method in methods if method.startswith("_")], methods
    assert types.CustomLossGraph.model_validate_json(graph.model_dump_json()) == graph


def test_a_traced_loss_runs_at_other_lengths_than_it_was_recorded_at():
    handle = traced("gspo")
    for length in (1, 2, 40):
        logp = torch.full((length,), -1.0, requires_grad=True)
        loss, metrics = handle.graph(logp, torch.full((length,), -1.0001), torch.ones(length), torch.ones(length))
        loss.backward()
        assert metrics["custom/trustrl/tokens:sum"] == length
        torch.testing.assert_close(logp.grad, torch.full((length,), -1.0001 / length), atol=1e-6, rtol=1e-6)


def test_a_traced_loss_counts_masked_and_dropped_tokens():
    handle = traced("dppo-binary-tv")
    logp = torch.tensor([-0.1, -0.9, -1.0, -1.0], requires_grad=True)
    loss, metrics = handle.graph(
        logp, torch.tensor([-0.9, -1.0, torch.nan, torch.nan]), torch.ones(4), torch.tensor([1, 1, 1, 0])
    )
    loss.backward()
    assert {name: value.item() for name, value in metrics.items()} == {
        "custom/trustrl/tokens:sum": 3,
        "custom/trustrl/masked_tokens:sum": 1,
        "custom/trustrl/dropped_tokens:sum": 1,
    }
    assert (logp.grad != 0).tolist() == [False, True, False, False]


def test_tinker_itself_cannot_trace_policy_loss_which_is_why_the_graph_is_recorded():
    def loss(logprobs, sampling_logprobs, advantages, mask):
        out = trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logprobs),
            trustrl.RolloutTokens(behavior_logp=sampling_logprobs, advantage=advantages, in_loss=mask),
            trustrl.preset("dppo-binary-tv"),
            reduction=trustrl.TokenSum(),
        )
        return out.loss, {}

    with pytest.raises(ValueError, match=r"cannot be traced by torch\.fx"):
        custom_loss.trace_loss(loss, input_ranks(loss), SESSION)


@pytest.mark.parametrize("name", parity.PRESETS)
def test_the_hook_in_tinkers_own_client_sends_the_oracles_gradient_with_a_fake_service(name):
    sent = {}
    loss_fn = loss_hook(trustrl.preset(name), average=average(name))

    def gradient(batch):
        sent.clear()
        result = FakeService(batch, sent).forward_backward_custom(data_of(batch), loss_fn).result()
        assert all(type(value) is float for value in result.metrics.values())
        assert "trustrl/masked_share" in result.metrics
        return -torch.stack([datum.loss_fn_inputs["weights"].to_torch() for datum in sent["backward"]])

    parity.check(name, gradient, weights(name))


@pytest.mark.parametrize("name", ["dppo-binary-tv", "minirl"])
def test_a_handle_without_an_upload_in_tinkers_own_client_with_a_fake_service(name):
    sent = {}
    handle = traced(name)

    def gradient(batch):
        sent.clear()
        FakeService(batch, sent).forward_backward_custom(traced_data(data_of(batch)), handle).result()
        return -torch.stack([datum.loss_fn_inputs["weights"].to_torch() for datum in sent["backward"]])

    parity.check(name, gradient, weights(name))


class FakeService(training_client.TrainingClient):
    """tinker's own training client, whose requests are answered from a batch instead of the service, and kept.

    tinker 0.36 makes them in `forward_async` and `forward_backward_async`, and 0.38 in `_run_fwd_bwd`, in chunks.
    """

    def __init__(self, batch, sent):
        self._batch, self._sent = batch, sent
        limits = SimpleNamespace(fwdbwd_max_chunk_bytes_count=10**9, fwdbwd_max_chunk_len=4)
        self.holder = SimpleNamespace(
            get_session_id=lambda: SESSION,
            _client_config=limits,
            run_coroutine_threadsafe=lambda request: FakeFuture(asyncio.run(request)),
        )
        self._request_id_lock, self._request_id_counter = threading.Lock(), 0

    async def forward_async(self, data, loss_fn, loss_fn_config):
        rows = [{"logprobs": types.TensorData.from_torch(row.detach())} for row in self._batch.logp]
        return FakeFuture(SimpleNamespace(loss_fn_outputs=rows))

    async def forward_backward_async(self, data, loss_fn, loss_fn_config):
        self._sent["backward"] = data
        return FakeFuture(types.ForwardBackwardOutput("", [], {"loss:sum": 0.0}))

    def _run_fwd_bwd(self, requests, loss_fn, loss_fn_config, *, forward_only):
        run = self.forward_async if forward_only else self.forward_backward_async
        return FakeFuture(run([datum for chunk in requests for datum in chunk.data], loss_fn, loss_fn_config))


class FakeFuture:
    def __init__(self, result):
        self._result = result

    def result(self):
        return self._result

    async def result_async(self, timeout=None):
        return await (await self._result).result_async() if inspect.iscoroutine(self._result) else self._result


@pytest.fixture(autouse=True)
def fake_combined_future(monkeypatch):
    """tinker's combined future needs its event loop thread; the transformation it applies is tinker's."""
    monkeypatch.setattr(
        training_client,
        "_CombinedAPIFuture",
        lambda futures, transform, holder: FakeFuture(transform([future.result() for future in futures])),
    )


def test_create_loss_calls_tinkers_service_client_with_a_fake_holder():
    signature = inspect.signature(service_client.ServiceClient.create_custom_loss)
    assert tuple(signature.parameters) == ("self", "fn", "input_ranks")

    class FakeClient:
        create_custom_loss = service_client.ServiceClient.create_custom_loss

        def _create_custom_loss_submit(self, fn, ranks):
            return custom_loss.trace_loss(fn, ranks, SESSION)

    handle = create_loss(FakeClient(), trustrl.preset("minirl"))
    assert handle.name == "trustrl_minirl"
    assert handle.input_names == ("sampling_logprobs", "proximal_logprobs", "advantages", "mask")


@pytest.mark.parametrize("make", [traceable_loss, loss_hook])
@pytest.mark.parametrize("name", sorted(set(trustrl.presets()) - set(parity.PRESETS)))
def test_a_region_that_reads_the_vocabulary_is_refused(make, name):
    with pytest.raises(ConfigError, match="must read only sampled tokens in tinker"):
        make(trustrl.preset(name))


@pytest.mark.parametrize("make", [traceable_loss, loss_hook])
def test_a_region_defined_per_sequence_needs_its_average(make):
    with pytest.raises(ConfigError, match="average must be 'sequence-mean' with gspo"):
        make(trustrl.preset("gspo"))


@pytest.mark.parametrize("make", [traceable_loss, loss_hook])
def test_a_region_with_ages_is_refused(make):
    with pytest.raises(ConfigError, match="max_staleness must be None in tinker, got 2"):
        make(trustrl.preset("dppo-binary-tv", max_staleness=2))


def test_a_region_whose_graph_depends_on_the_length_is_refused_when_traced():
    region = regions.TrustRegion(statistic=regions.BinaryTV(max_increase=0.2), level=PrefixBudget())
    with pytest.raises(ConfigError, match="Use `loss_hook`"):
        traceable_loss(region)
    assert loss_hook(region)


def test_missing_inputs_are_refused_by_name():
    batch = parity.read("tis").batch
    data, rows = data_of(batch), list(batch.logp)
    for key, error in (
        ("logprobs", r'loss_fn_inputs\["logprobs"\] must be given'),
        ("proximal_logprobs", r'loss_fn_inputs\["proximal_logprobs"\] must be given'),
        ("advantages", r'data\[0\]\.loss_fn_inputs\["advantages"\] must be given'),
        ("mask", r'data\[0\]\.loss_fn_inputs\["mask"\] must be given'),
    ):
        less = [types.Datum(d.model_input, {k: v for k, v in d.loss_fn_inputs.items() if k != key}) for d in data]
        with pytest.raises(MissingDataError, match=error):
            loss_hook(trustrl.preset("tis"))(less, rows)
    with pytest.raises(MissingDataError, match=r'loss_fn_inputs\["logprobs"\] must be given'):
        traced_data([types.Datum(data[0].model_input, {"target_tokens": [1]})])


def test_several_targets_at_a_position_are_refused():
    batch = parity.read("ppo").batch
    with pytest.raises(RecordError, match="one target token at each position"):
        loss_hook(trustrl.preset("ppo"))(data_of(batch)[:1], [torch.zeros(12, 3)])
