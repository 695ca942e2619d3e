"""Every kind of region in verl's real Megatron engine: gradients and verdicts against plain models of transformers."""

import importlib.util
import json

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

from support import regions_oracle as oracle
from support.devices import ON_GPU
from support.megatron_layouts import CONTROLS, LAYOUTS, TOLERANCE, Layout
from support.verl_launch import ON_MEGATRON, on_ranks


def on_this_device(settings):
    """On a GPU, packed sequences need 16-bit attention; padded ones run in float32."""
    if not ON_GPU:
        return settings
    dtype = "bfloat16" if settings.get("packed", True) else "float32"
    return settings | {"dtype": dtype, "mbridge": importlib.util.find_spec("mbridge") is not None}


def run(folder, layout, **more):
    arguments = folder / "found.json", json.dumps(on_this_device(layout.settings) | more)
    on_ranks("verl_megatron.py", layout.ranks, *arguments, folder="verl_megatron", modules=ON_MEGATRON)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if one.quick else pytest.mark.long) for name, one in LAYOUTS.items()]
)
def test_every_region_has_the_plain_models_gradient(name, tmp_path):
    layout = LAYOUTS[name]
    found = run(tmp_path, layout)
    if not layout.settings.get("vocabulary"):
        assert found["cases"].keys() == (oracle.CASES | oracle.TRUNCATED).keys()
    for case, ours in found["cases"].items():
        assert ours["metrics"]["trustrl/tokens"][0] > 0
        assert max(ours["rounding"].values(), default=0.0) <= 1, (case, ours["rounding"])
        if on_this_device(layout.settings).get("dtype", "float32") != "float32":
            continue  # the layers below the output layer round as they like
        assert ours["error"] <= TOLERANCE, case
        if found["replicas"] == 1:  # else the oracle's verdicts are those of all replicas
            assert ours["keep"] == ours["wanted_keep"], case
            assert ours["weight"] == pytest.approx(ours["wanted_weight"], rel=1e-4), case
            if not layout.settings.get("moe") and case in oracle.AGREEING and not layout.settings.keys() & OTHER_MODEL:
                oracle.check_agreement(case, ours["keep"], ours["weight"])  # the same as in TRL and on FSDP


OTHER_MODEL = {"layers", "tied"}


def test_a_padded_vocabulary_is_warned_about_where_verls_log_probs_include_it(tmp_path):
    """96 ids for a vocabulary of 64: what the vocabulary pass leaves out, verl's own softmax counts."""
    padded = LAYOUTS["tensor parallel 2, padded vocabulary"]
    found = run(tmp_path, padded._replace(settings=padded.settings | {"vocabulary": False}), only="binary on μ")
    assert found["cases"]["binary on μ"]["error"] > 1000 * TOLERANCE
    (said,) = {text for text in found["warnings"] if "pads the vocabulary" in text}
    assert "from 64 to 96 ids" in said


def test_in_bf16_the_limits_come_from_the_rounding_of_the_products(tmp_path):
    """And they see a sum over ranks that is left out."""
    case = "TROLL on π'"
    settings = {"tp": 2, "sequence_parallel": False, "dtype": "bfloat16"}
    right, wrong = (
        run(tmp_path, Layout(2, settings), only=case, unsummed=unsummed)["cases"][case]["rounding"]
        for unsummed in (False, True)
    )
    assert {"log_probs", "gathered_logp", "tail_logp", "gradient of the states"} <= right.keys()
    assert max(right.values()) <= 1, right
    assert wrong.pop("gradient of the states") > 5
    assert max(wrong.values()) <= 1, wrong


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_left_out_is_seen(name, tmp_path):
    """Without the sum, the head's gradient is right and every other parameter's is not."""
    case = "top-K on μ"
    found = run(tmp_path, CONTROLS[name], only=case)
    assert found["cases"][case]["error"] > 1000 * TOLERANCE
