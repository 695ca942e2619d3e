"""The gloo channel by itself, and vLLM's four phases over it; `test_server.py` does it between processes."""

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource

from support.tiny_models import LONGEST, logps, perturb, save_model, some_sequences
from trustrl.engines.vllm import cpu_options, gloo_transfer, score
from trustrl.engines.vllm.clients import LocalClient
from trustrl.engines.vllm.gloo_channel import Channel, Listener
from trustrl.engines.vllm.gloo_transfer import BACKEND, GlooTrainerInitInfo
from trustrl.errors import ConfigError, DuplicateNameError, EngineError

EXACT = 1e-4

pytestmark = pytest.mark.xdist_group("transfer")


@pytest.fixture(scope="module")
def samplers(tmp_path_factory):
    built = {}

    def sampler(tied):
        if tied not in built:
            path = tmp_path_factory.mktemp("model")
            save_model(path, tied=tied)
            llm = LLM(
                model=str(path),
                max_model_len=LONGEST,
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                **cpu_options(kv_cache_memory_bytes=1 << 26),
            )
            built[tied] = llm, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return built[tied]

    yield sampler
    KEPT.append(built)


KEPT = []  # a collected engine would take the process groups of all others with it


def gap(llm, model):
    (ids,) = some_sequences(40)
    return (score(llm, [ids], [1], k=0).logp[0] - logps(model, ids)).abs().max()


def connected(llm, source, **settings):
    info = GlooTrainerInitInfo(rank=0, **settings)
    return WeightTransferTrainerFactory.trainer_init(info, client=LocalClient(llm), source=source)


def test_an_engine_in_this_process_takes_the_weights(samplers, tied):
    llm, model = samplers(tied)
    sender = connected(llm, ModuleSource(model))
    for version in ("one", "two"):
        perturb(model)
        assert gap(llm, model) > 0.1
        sender.send_weights(version)
        assert gap(llm, model) < EXACT
        assert llm.get_weight_version() == version
    sender.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        sender.send_weights()


def test_a_source_that_contradicts_itself_is_found_before_it_is_sent(samplers):
    llm, model = samplers(True)

    class Contradiction(ModuleSource):
        def __iter__(self):
            for name, weight in super().__iter__():
                yield name, weight.bfloat16() if name == "model.norm.weight" else weight

    sender = connected(llm, Contradiction(model), timeout_seconds=1.0)
    with pytest.raises(EngineError, match=r"must yield model.norm.weight torch.float32 .* got .* torch.bfloat16"):
        sender.send_weights()
    time.sleep(1.5)  # the sampler waits that long, and is a sampler again
    perturb(model)
    connected(llm, ModuleSource(model)).send_weights()
    assert gap(llm, model) < EXACT


def test_trainers_that_do_not_send_only_gather(samplers):
    llm, model = samplers(True)
    gathered = []

    class Counted(ModuleSource):
        def __iter__(self):
            for name, weight in super().__iter__():
                gathered.append(name)
                yield name, weight

    info = GlooTrainerInitInfo(rank=1)
    WeightTransferTrainerFactory.trainer_init(info, client=LocalClient(llm), source=Counted(model)).send_weights()
    assert gathered == [name for name, _ in model.named_parameters()]


def test_the_name_is_not_taken_twice():
    with pytest.raises(DuplicateNameError, match="'trustrl-gloo' must be trustrl's, and another"):
        gloo_transfer._register()


def test_a_client_that_cannot_empty_the_cache_is_refused(samplers):
    _, model = samplers(True)
    four_phases = SimpleNamespace(
        init_weight_transfer_engine=print, start_weight_update=print, update_weights=print, finish_weight_update=print
    )
    with pytest.raises(ConfigError, match="reset_prefix_cache"):
        WeightTransferTrainerFactory.trainer_init(
            GlooTrainerInitInfo(rank=0), client=four_phases, source=ModuleSource(model)
        )


def test_weights_must_come_from_somewhere(samplers):
    with pytest.raises(ConfigError, match=r"ModuleSource\(model\)"):
        connected(samplers(True)[0], None)


@pytest.mark.parametrize(
    "setting", [{"num_workers": 0}, {"port": -1}, {"timeout_seconds": 0.0}, {"address": "0.0.0.0"}]
)
def test_settings_out_of_range(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        GlooTrainerInitInfo(rank=0, **setting)


def test_a_sampler_that_refuses_is_heard_at_once(samplers):
    llm, model = samplers(True)
    client = LocalClient(llm)
    client.init_weight_transfer_engine = lambda _: (_ for _ in ()).throw(ValueError("no such engine"))
    start = time.monotonic()
    with pytest.raises(ValueError, match="no such engine"):
        WeightTransferTrainerFactory.trainer_init(
            GlooTrainerInitInfo(rank=0), client=client, source=ModuleSource(model)
        )
    assert time.monotonic() - start < 10


class TestChannel:
    def pair(self, timeout_seconds=10.0):
        listener = Listener("127.0.0.1", 0, num_receivers=1, timeout_seconds=timeout_seconds)
        ends = []

        def join():
            ends.append(Channel.join("127.0.0.1", listener.port, rank=1, world_size=2, timeout_seconds=timeout_seconds))

        thread = threading.Thread(target=join)
        thread.start()
        sender = listener.accept(lambda: None)
        thread.join()
        return sender, ends[0]

    @pytest.mark.parametrize(
        "tensor",
        [
            pytest.param(torch.randn(3, 5), id="float32"),
            pytest.param(torch.randn(4, 6).T, id="transposed"),
            pytest.param(torch.randn(7).bfloat16(), id="bfloat16"),
            pytest.param(torch.randn(8).to(torch.float8_e4m3fn), id="float8"),
            pytest.param(torch.tensor(2.5), id="a scalar"),
            pytest.param(torch.empty(0, 4), id="empty"),
            pytest.param(torch.randn(5, requires_grad=True), id="a parameter"),
        ],
    )
    def test_what_is_sent_arrives(self, tensor):
        sender, receiver = self.pair()
        arrived = []
        thread = threading.Thread(target=lambda: arrived.append(receiver.receive(list(tensor.shape), tensor.dtype)))
        thread.start()
        sender.send(tensor)
        thread.join()
        assert arrived[0].dtype == tensor.dtype
        assert torch.equal(arrived[0].float(), tensor.detach().float())

    def test_a_sampler_that_does_not_come_is_not_waited_for(self):
        with pytest.raises(EngineError, match=r"All 2 of the sampler's workers must join .* within 0.3 s, got 0"):
            Listener("127.0.0.1", 0, num_receivers=2, timeout_seconds=0.3).accept(lambda: None)

    def test_a_trainer_that_is_not_there_is_not_waited_for(self):
        with pytest.raises(EngineError, match=r"The trainer did not answer on 127.0.0.1:1"):
            Channel.join("127.0.0.1", 1, rank=1, world_size=2, timeout_seconds=0.5)

    def test_a_port_in_use_is_named(self):
        taken = Listener("127.0.0.1", 0, num_receivers=1, timeout_seconds=1.0)
        with pytest.raises(EngineError, match=f"127.0.0.1:{taken.port} must be a free address"):
            Listener("127.0.0.1", taken.port, num_receivers=1, timeout_seconds=1.0)

    def test_a_sender_that_stops_is_noticed(self):
        _sender, receiver = self.pair(timeout_seconds=0.5)
        with pytest.raises(EngineError, match=r"must keep up within 0.5 s, and one did not"):
            receiver.receive([4], torch.float32)
