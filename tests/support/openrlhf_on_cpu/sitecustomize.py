"""On PYTHONPATH, this lets OpenRLHF 0.11 run on a CPU: what it asks of CUDA is answered by the CPU, in every process.

Four modules of OpenRLHF are changed when they are imported; everything else is OpenRLHF's own code.
"""

import importlib.abc
import sys


def on_openrlhf(_):
    """`torch.cuda` without a GPU: the current device is the CPU, and there is nothing to wait for."""
    import torch

    class Cpu(str):
        """The device "cpu", and "0" inside f"cuda:{...}", where OpenRLHF names a device that it does not use."""

        def __format__(self, spec):
            return "0"

    torch.cuda.current_device = lambda: Cpu("cpu")
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)


def on_strategy(module):
    """The device mesh of gloo's ranks."""
    mesh = module.init_device_mesh
    module.init_device_mesh = lambda device, *args, **kwargs: mesh("cpu", *args, **kwargs)


def on_distributed(module):
    """Weights travel over gloo, inside this machine: a channel refuses the address that Ray gives the machine."""

    def group(address, port, rank, world_size, device):
        from trustrl.engines.vllm.gloo_channel import Channel, Listener

        address = "127.0.0.1"
        if rank == 0:
            listener = Listener(address, port, num_receivers=world_size - 1, timeout_seconds=900)
            return Sender(listener.accept(lambda: None))
        return Channel.join(address, port, rank=rank, world_size=world_size, timeout_seconds=900)

    class Sender:
        def __init__(self, channel):
            self.channel = channel

        def broadcast(self, tensor, src, stream):
            self.channel.send(tensor)

    module.stateless_init_process_group = group


def on_vllm_worker(module):
    """vLLM's CPU build packs its weights, so they are loaded together, when the last one has arrived."""

    def update_weight(self, name, dtype, shape, empty_cache=False):
        from trustrl.engines.vllm.weight_reload import reloaded

        waiting = self.__dict__.setdefault("waiting_weights", [])
        waiting.append((name, self._model_update_group.receive(list(shape), dtype)))
        if empty_cache:
            with reloaded(self.model_runner):
                self.model_runner.model.load_weights(waiting)
            waiting.clear()

    module.WorkerWrap.update_weight = update_weight


CHANGED = {
    "openrlhf": on_openrlhf,
    "openrlhf.utils.deepspeed.deepspeed": on_strategy,
    "openrlhf.utils.distributed_util": on_distributed,
    "openrlhf.trainer.ray.vllm_worker_wrap": on_vllm_worker,
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        change = CHANGED.get(fullname)
        if change is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), change(module))
        return spec


sys.meta_path.insert(0, Finder())
