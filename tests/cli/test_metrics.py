"""`trustrl metrics`: the dictionary on the command line."""

import json
import subprocess
import sys

import pytest

from trustrl.cli import main
from trustrl.core.metrics import METRICS


def test_the_list_has_one_line_for_each_metric(capsys):
    assert main(["metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [metric.name for metric in METRICS]
    assert all(f"{metric.formula} [{metric.unit}]" in line for line, metric in zip(lines, METRICS, strict=True))


@pytest.mark.parametrize("name", ["ratio_mean", "trustrl/ratio_mean", "actor/trustrl/ratio_mean"])
def test_an_entry_says_what_it_is_and_what_to_do(name, capsys):
    assert main(["metrics", name]) == 0
    said = capsys.readouterr()
    for words in ("trustrl/ratio_mean", "mean of r = π/b", "1 ± 0.02", "Far from 1, another policy sampled them"):
        assert words in said.out
    assert said.err == ""


def test_json_is_the_entry_or_all_of_them(capsys):
    assert main(["metrics", "kl_k3", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["name"] == "trustrl/kl_k3"
    assert entry["unit"] == "nats"
    assert entry["elsewhere"] == {"prime-rl": "mismatch_kl"}
    assert main(["metrics", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)
    assert len(every) == len(METRICS)
    assert entry in every


def test_a_wrong_name_ends_with_2_and_the_nearest_one(capsys):
    assert main(["metrics", "trustrl/masked_shar"]) == 2
    said = capsys.readouterr()
    assert "Did you mean 'masked_share'?" in said.err
    assert said.out == ""


def test_the_dictionary_is_read_without_torch():
    code = "import sys\nfrom trustrl.cli import main\nmain(['metrics'])\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
