"""The public surface, frozen: adding a name is a decision, removing one is a breaking change."""

import difflib
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import surface

import trustrl
from trustrl import regions

COMMAND = "python scripts/surface.py"


def test_names_parameters_defaults_and_presets_are_frozen():
    before, now = surface.FILE.read_text(), surface.text()
    changed = difflib.unified_diff(before.splitlines(), now.splitlines(), "frozen", "now", lineterm="", n=3)
    assert before == now, (
        "The public surface must be what tests/api/surface.txt says, and it differs:\n"
        + "\n".join(changed)
        + f"\nIf that is meant, say so in CHANGELOG.md (breaking changes first) and run `{COMMAND}`."
    )


def test_dir_shows_the_public_names_and_no_others():
    assert dir(trustrl) == sorted(trustrl.__all__)
    assert dir(regions) == regions.__all__


def test_the_top_level_has_at_most_25_names():
    assert len({*trustrl.__all__} - {"__version__"}) <= 25


def test_every_name_is_there_and_documented():
    for module in (trustrl, regions):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), name


def test_the_stub_lists_each_public_name_once():
    """Type checkers read the stub, and `__init__.py` reads it too; a name without `as` would be private to them."""
    stub = Path(trustrl.__file__).with_suffix(".pyi").read_text()
    exported = re.findall(r"(\w+) as \1\b", stub)
    assert "import *" not in stub
    assert len(exported) == len(set(exported))
    assert sorted([*exported, "__version__"]) == sorted(trustrl.__all__)


def test_the_stub_of_regions_names_what_their_files_define():
    assert surface.STUB.read_text() == surface.stub(), f"Run `{COMMAND}`."
    assert sorted(re.findall(r"(\w+) as \1\b", surface.STUB.read_text())) == regions.__all__


MOVED = [
    "BinaryKL", "BinaryTV", "CISPO", "CPPO", "CleanTokens", "DPPO", "DRPO", "Decision", "DivergenceGate", "FullKL",
    "FullTV", "GMPO", "GSPO", "IPO", "IcePop", "Interval", "KPOP", "LogRatio", "M2PO", "MIS", "MiniRL", "Needs",
    "OPSM", "PPO", "PolicyGradient", "PrefixBudget", "Ratio", "Region", "SAPO", "SPO", "SampledK2", "SampledK3",
    "ScoreCentering", "SequenceRatio", "SymmetricBinaryKL", "TIS", "TRM", "TROLL", "TopKKL", "TopKTV",
    "TrustRegion", "VESPO", "register_region",
]  # fmt: skip
"""Names that `trustrl` had before they moved to `trustrl.regions`."""


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_moved_works_until_0_3_and_warns_once(name, monkeypatch):
    assert name in regions.__all__
    assert name not in trustrl.__all__
    monkeypatch.delitem(vars(trustrl), name, raising=False)  # a name that was used is kept
    moved = rf"^trustrl\.{name} is now trustrl\.regions\.{name}\. The old name will be removed in release 0\.3\.$"
    with pytest.warns(DeprecationWarning, match=moved) as caught:
        assert getattr(trustrl, name) is getattr(regions, name)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        assert getattr(trustrl, name) is getattr(regions, name)
    del vars(trustrl)[name]


def test_a_plain_loss_is_in_functional_alone():
    assert not hasattr(trustrl, "dppo_loss")
    assert "dppo_loss" in trustrl.functional.__all__


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(trustrl, "old_logp")


def test_every_error_has_one_root():
    from trustrl import errors

    raised = [
        x
        for x in vars(errors).values()
        if inspect.isclass(x) and issubclass(x, Exception) and x.__module__ == errors.__name__
    ]
    for error in raised:
        assert issubclass(error, (trustrl.errors.TrustRLError, trustrl.errors.TrustRLWarning)), error


def test_the_version_is_the_packages():
    declared = re.search(r'^version = "(.+)"', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.M)
    assert declared[1] == trustrl.__version__


def test_import_is_instant():
    """Names load when used: importing the package brings in no torch, and neither do regions and their settings."""
    code = "import sys, trustrl; trustrl.regions.DPPO(trustrl.regions.BinaryTV()); sys.exit('torch' in sys.modules or 'jaxtyping' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CALLS_OF_IMPORTS = """
import sys

def count(frame, event, argument):
    global calls
    calls += event == "call"

calls = 0
sys.setprofile(count)
import torch
torchs = calls
import trustrl
trustrl.policy_loss, trustrl.token_logprobs
sys.setprofile(None)
print(torchs, calls - torchs)
"""


def test_the_two_calls_add_less_than_a_fifth_to_importing_torch():
    """Python calls are counted: seconds would depend on what else the machine does."""
    done = subprocess.run([sys.executable, "-c", CALLS_OF_IMPORTS], capture_output=True, text=True, check=True)
    torchs, ours = map(int, done.stdout.split())
    assert 0 < ours < torchs / 5


def test_the_word_old_is_not_in_the_api():
    """It means one policy in one mode and another in the next."""
    for name in trustrl.__all__:
        value = getattr(trustrl, name)
        if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
            assert not any("old" in p.split("_") for p in inspect.signature(value).parameters), name
