"""launch/slurm.sbatch on a real Slurm of two nodes on this machine: queued again in the middle, it resumes.

Needs Debian's slurm-wlm and munge, and root. `nox -s slurm` runs it; CI does not.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("verl")

if not shutil.which("slurmctld") or os.geteuid():
    pytest.skip("needs slurm-wlm, munge and root", allow_module_level=True)

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 16, 4
SETTINGS = (
    f"schedule.steps={STEPS}", f"schedule.checkpoint_every={EVERY}", "engine.ranks_per_node=1", "evaluation.count=32",
    "records.sample=1.0",
)  # fmt: skip
CONFIGURATION = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port=17001 CPUs=1 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=17002 CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment of a cluster of two nodes, which ends with the tests."""
    folder = tmp_path_factory.mktemp("slurm")
    file = folder / "slurm.conf"
    (folder / "state").mkdir()
    file.write_text(CONFIGURATION.format(folder=folder, host=socket.gethostname().partition(".")[0]))
    if subprocess.run(["pgrep", "-x", "munged"], check=False, stdout=subprocess.DEVNULL).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge")
        subprocess.run(["su", "munge", "-s", "/bin/sh", "-c", "munged --force"], check=True)
    daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    running = [subprocess.Popen([*daemon, "-f", file], stderr=subprocess.DEVNULL) for daemon in daemons]
    yield os.environ | {
        "SLURM_CONF": str(file),
        "RAY_OPTIONS": "--num-cpus=32 --num-gpus=1 --object-store-memory=268435456",
        "HF_HUB_OFFLINE": "1",
    }
    for daemon in running:
        daemon.terminate()
        daemon.wait(60)


def submitted(run, cluster):
    script = str(ROOT / "launch/slurm.sbatch")
    job = subprocess.run(
        ["sbatch", "--parsable", "--nodes=2", script, "verl-tour", run, *SETTINGS], cwd=run.parent, env=cluster,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return job.stdout.strip()


def wait_until(happened, seconds, log):
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(log.read_text() if log.exists() else "no log")
        time.sleep(2)


def rows(run, name="metrics"):
    file = run / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.long
def test_a_job_that_is_queued_again_resumes_and_its_records_are_complete(slurm, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    job = submitted(cut, slurm)
    log = tmp_path / f"trustrl-{job}.log"
    wait_until(lambda: (cut / "checkpoints").exists() and len(rows(cut)) >= EVERY // 2 + 1, 900, log)
    subprocess.run(["scontrol", "requeue", job], env=slurm, check=True)
    wait_until((cut / "result.json").exists, 1800, log)
    assert "resuming after step" in log.read_text()
    job = submitted(whole, slurm)
    wait_until((whole / "result.json").exists, 900, tmp_path / f"trustrl-{job}.log")

    for run in (cut, whole):
        assert [row["step"] for row in rows(run)] == list(range(2, STEPS + 1, 2)), "every step once"
        recorded = {tuple(file.name.split(".")[:2]) for file in (run / "records").glob("step-*")}
        batches = range(1, STEPS // 2 + 1)
        assert recorded == {(f"step-{batch:08d}", f"rank-{rank:04d}") for batch in batches for rank in (0, 1)}
    # Not the same numbers: two servers answer in any order, and no checkpoint has their random state.
    gains = [rows(run, "evaluation")[-1]["accuracy"] - rows(run, "evaluation")[0]["accuracy"] for run in (cut, whole)]
    assert min(gains) > 0
