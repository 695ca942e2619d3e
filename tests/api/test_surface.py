"""The public surface, frozen: adding a name is a decision, removing one is a breaking change."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import trustrl

SURFACE = [
    "Anchor",
    "BinaryKL",
    "BinaryTV",
    "CISPO",
    "CPPO",
    "ConfigError",
    "DPPO",
    "DRPO",
    "Decision",
    "DownloadError",
    "DuplicateNameError",
    "EngineError",
    "EntropyBonus",
    "FixedLength",
    "FullDivergence",
    "FullKL",
    "FullTV",
    "FullVocabulary",
    "GSPO",
    "IPO",
    "IcePop",
    "IncompatibleSamplingError",
    "Interval",
    "KLPenalty",
    "KPOP",
    "LossOutput",
    "METRICS",
    "MIS",
    "MiniRL",
    "MissingDataError",
    "MissingPackageError",
    "Needs",
    "NonFiniteError",
    "PPO",
    "PolicyGradient",
    "PolicyTokens",
    "PrefixBudget",
    "Ratio",
    "RecordError",
    "Region",
    "RolloutTokens",
    "SAPO",
    "SPO",
    "SampledK2",
    "SampledK3",
    "Sampling",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "SequenceRatio",
    "Sums",
    "SymmetricBinaryKL",
    "TIS",
    "TRM",
    "TROLL",
    "TokenLogprobs",
    "TokenMean",
    "TokenSum",
    "TokenWeights",
    "Tokens",
    "TopK",
    "TopKKL",
    "TopKTV",
    "TopLogprobs",
    "TrustRLError",
    "TrustRLWarning",
    "TrustRegion",
    "UnknownNameError",
    "VocabShard",
    "__version__",
    "check",
    "config_from_dict",
    "config_to_dict",
    "merge",
    "policy_loss",
    "preset",
    "presets",
    "rates",
    "register_region",
    "token_logprobs",
    "within_kept",
]


def test_the_surface_is_frozen():
    assert sorted(trustrl.__all__) == sorted(SURFACE)
    assert dir(trustrl) == sorted(SURFACE)


def test_every_name_is_there_and_documented():
    for name in SURFACE:
        value = getattr(trustrl, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_type_checkers_see_the_same_names():
    """The block under TYPE_CHECKING repeats the lazy table; here they are held together."""
    source = Path(trustrl.__file__).read_text()
    block = source.split("if TYPE_CHECKING:")[1].split("def __getattr__")[0]
    assert sorted({*re.findall(r"(\w+) as \1\b", block), "__version__"}) == sorted(SURFACE)


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
        assert issubclass(error, (trustrl.TrustRLError, trustrl.TrustRLWarning)), error


def test_the_version_is_the_packages():
    declared = re.search(r'^version = "(.+)"', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.M)
    assert declared[1] == trustrl.__version__


def test_import_is_instant():
    """Names load when used: importing the package brings in no torch."""
    code = "import sys, trustrl; sys.exit('torch' in sys.modules or 'jaxtyping' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_word_old_is_not_in_the_api():
    """It means one policy in one mode and another in the next."""
    for name in SURFACE:
        value = getattr(trustrl, name)
        if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
            assert not any("old" in p.split("_") for p in inspect.signature(value).parameters), name
