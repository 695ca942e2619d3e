"""A model that FSDP2 shards over two processes has the gradients of the whole model, read beside ms-swift's logits.

`fully_shard` is applied by hand: on a CPU, accelerate runs DDP where FSDP2 is asked for.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip("swift")

from support import swift_ranks_worker as work
from support.rendezvous import own_environment, python_path

LARGEST_ERROR = 1e-6
REGIONS = {
    "dppo-topk-tv": {"preset": "dppo-topk-tv", "max_increase": 0.1, "max_decrease": 0.1, "k": 20},
    "troll": {"preset": "troll", "bound": 0.01, "k": 64},
}


@pytest.fixture(scope="module", params=REGIONS)
def errors(request, given, tmp_path_factory):
    """The largest error of a gradient over the largest gradient, for each sharding of the output layer."""
    folder = tmp_path_factory.mktemp(request.param)
    region = {"TRUSTRL_REGION": json.dumps(REGIONS[request.param]), "TRUSTRL_BEHAVIOR": "trainer"}
    environment = own_environment(PYTHONPATH=python_path(), OMP_NUM_THREADS="1", **region)
    commands = [[sys.executable, work.__file__, str(rank), folder, json.dumps(given)] for rank in range(2)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said[-4000:]
    return json.loads((folder / "errors.json").read_text())


@pytest.mark.parametrize("sharding", work.EVERY)
def test_a_sharded_model_has_the_gradients_of_the_whole_model(errors, sharding):
    assert errors[sharding] <= LARGEST_ERROR
