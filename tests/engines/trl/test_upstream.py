"""The page that upstream/ offers to TRL's documentation: its code trains, and the metrics it names are logged."""

import re
from pathlib import Path

import pytest

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

import trl

from support.trl_world import settings, tiny_model, tokenizer

PAGE = (Path(__file__).parents[3] / "upstream/trl/trustrl_integration.md").read_text()
USAGE, LINES = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def test_the_code_trains_and_logs_what_the_page_names(tmp_path, monkeypatch):
    """A tiny model for the hub's, and `generate` for vLLM; all other arguments are the page's."""
    tiny_model().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    data = datasets.Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: data)
    taken = {}

    def config(**given):
        taken.update(given)
        return settings(num_iterations=given["num_iterations"], max_steps=2, logging_steps=1)

    monkeypatch.setattr(trl, "GRPOConfig", config)
    code = USAGE.replace('"Qwen/Qwen3-0.6B"', repr(str(tmp_path)))
    code = code.replace("    region=", '    behavior="trainer",\n    measure_mismatch=True,\n    region=')
    assert code.count(str(tmp_path)) == code.count("measure_mismatch") == 1
    names = {}
    exec(code + LINES, names)
    assert taken == {"num_iterations": 4, "use_vllm": True, "vllm_importance_sampling_correction": False}
    (log, *_) = names["trainer"].state.log_history
    assert set(re.findall(r"^- `(.+?)`", PAGE, re.M)) <= set(log)
    assert len(names["regions"]) == 3
