"""`python -m trustrl.engines.openrlhf` on Ray: vLLM samples, DeepSpeed trains, and weights go back, on the CPU.

What OpenRLHF asks of CUDA and flash-attention is answered by the stubs in support/openrlhf_on_cpu.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")

import torch
from safetensors.torch import load_file

from support.tiny_models import save_model

STUBS = Path(__file__).parents[2] / "support/openrlhf_on_cpu"
REWARD = """
import torch

def reward_func(queries, prompts, labels, **more):
    digits = [float(sum(c.isdigit() for c in q[len(p) :])) for q, p in zip(queries, prompts)]
    return {"rewards": torch.tensor(digits), "scores": torch.tensor(digits), "extra_logs": {}}
"""
SAMPLED = ("--trustrl.region", "dppo-binary-tv", "--algo.advantage.is_correction_level", "token")
VOCABULARY = {
    "top_k": ("--trustrl.region", '{"preset": "dppo-topk-tv", "anchor": "proximal"}'),
    "troll": ("--trustrl.region", "troll"),
}
RECORDED = (
    "--trustrl.region", '{"preset": "dppo-topk-tv", "max_staleness": 1}', "--trustrl.max_kept", "150",
    "--rollout.top_p", "0.9", "--algo.advantage.is_correction_level", "token",
)  # fmt: skip
"""Everything that a region reads of the sampler: its top K, the kept ids of truncated sampling, and versions."""

SETTINGS = """
--algo.advantage.estimator group_norm --algo.kl.init_coef 0
--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 8
--rollout.max_new_tokens 8 --train.batch_size 16 --train.micro_batch_size 8 --train.max_epochs 4 --data.max_len 64
--data.label_key label --actor.adam.lr 3e-3 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
--actor.num_gpus_per_node 1 --vllm.num_engines 1 --vllm.enforce_eager --vllm.sync_backend gloo
--vllm.gpu_memory_utilization 0.5 --ds.attn_implementation eager
"""
STEPS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), SAMPLED)


@pytest.fixture(scope="module", params=VOCABULARY)
def trained_on_vocabulary(request, tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), VOCABULARY[request.param])


@pytest.fixture(scope="module")
def trained_on_records(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), RECORDED)


def train(folder, region):
    """Runs the command; returns the folder with the model before and after, and the log."""
    save_model(folder / "model", tied=False)
    lines = [json.dumps({"input": f"{i % 10}+{i // 10}=", "label": str(i)}) for i in range(8 * STEPS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "reward.py").write_text(REWARD)
    paths = {
        "--actor.model_name_or_path": "model", "--data.prompt_dataset": "prompts.jsonl",
        "--reward.remote_url": "reward.py", "--logger.tensorboard_dir": "logs", "--ckpt.output_dir": "trained",
        "--ckpt.path": "checkpoints",
    }  # fmt: skip
    places = [part for name, path in paths.items() for part in (name, str(folder / path))]
    with tempfile.TemporaryDirectory(prefix="r") as short:  # Ray's sockets allow paths of 107 characters
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "RAY_TMPDIR": short, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_OVERRIDE_RESOURCES": '{"GPU": 2, "CPU": 6}', "DS_ACCELERATOR": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "",
        }  # fmt: skip
        command = [sys.executable, "-m", "trustrl.engines.openrlhf", *region, *SETTINGS.split(), *places]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2400, check=False
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def logged(trained):
    return numbers(trained)


def numbers(folder):
    """Every logged number by name, step by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (folder / "logs").rglob("events.out.*")
    events = EventAccumulator(str(file))
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def named(logged, name):
    (values,) = [values for tag, values in logged.items() if tag.split("/", 1)[-1] == name]
    return values


@pytest.mark.long
def test_a_run_on_ray_with_stubs_for_cuda_logs_the_regions_metrics_every_step(logged):
    for name in ("trustrl/masked_share", "trustrl/kl_k3", "trustrl/dropped_share", "ppo_clip_ratio", "vllm_kl"):
        assert len(named(logged, name)) == STEPS, name
    assert named(logged, "trustrl/masked_share")[0] > 0.02
    assert set(named(logged, "trustrl/dropped_share")) == {0.0}


def moved(folder):
    """The mean change of the output layer's weights."""
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "trained"))
    return (after["lm_head.weight"].float() - before["lm_head.weight"].float()).abs().mean()


@pytest.mark.long
def test_a_run_on_ray_with_stubs_for_cuda_trains_and_keeps_the_sampler_in_step(trained, logged):
    assert moved(trained) > 1e-3
    assert torch.isfinite(moved(trained))
    # log μ by vLLM and log π' by the trainer after each weight sync, both in bf16
    assert max(map(abs, named(logged, "vllm_kl"))) < 0.02


@pytest.mark.long
def test_a_top_k_and_a_troll_run_on_ray_with_stubs_for_cuda_train_and_log_every_step(trained_on_vocabulary):
    logged = numbers(trained_on_vocabulary)
    for name in ("trustrl/masked_share", "trustrl/kl_k3", "trustrl/dropped_share", "ppo_kl"):
        assert len(named(logged, name)) == STEPS, name
    assert set(named(logged, "trustrl/dropped_share")) == {0.0}
    assert max(named(logged, "trustrl/kl_k3")) > 1e-3
    assert 1e-3 < moved(trained_on_vocabulary) < 1


@pytest.mark.long
def test_a_top_k_run_on_the_samplers_record_has_the_truncated_distribution_and_the_version_of_every_token(
    trained_on_records,
):
    logged = numbers(trained_on_records)
    assert len(named(logged, "trustrl/masked_share")) == STEPS
    assert set(named(logged, "trustrl/dropped_share")) == {0.0}
    # Weights go to the sampler after each step, so every token is of the weights that the step begins with.
    assert set(named(logged, "trustrl/staleness_mean")) == {0.0}
    # log μ by vLLM and log π' by the trainer inside the kept ids, both in bf16. Over the whole vocabulary, π' would be
    # lower by -log 0.9 = 0.1.
    assert max(map(abs, named(logged, "vllm_kl"))) < 0.02
    assert 1e-3 < moved(trained_on_records) < 1
