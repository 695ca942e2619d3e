"""Every name that an error or a warning tells the user to use exists."""

import ast
import importlib
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import trustrl
from trustrl import regions
from trustrl.cli import VERBS
from trustrl.config import statistics, terms, validators
from trustrl.config.axes import PrefixBudget, Region
from trustrl.regions import catalogue

SOURCE = Path(trustrl.__file__).parent
catalogue()  # loads the settings class of each region
RECORDS = {"PolicyTokens", "RolloutTokens", "TopK", "FullVocabulary", "FullDivergence", "Needs", "Decision"}
PLACEHOLDERS = {"trustrl.json", "trustrl.region", "trustrl.txt"}


def sentences(tree):
    """The literal text of every raise, warning and refusal; parts that are computed become a blank."""
    for node in ast.walk(tree):
        called = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(called, ast.Call):
            continue
        name = ast.unparse(called.func)
        if isinstance(node, ast.Raise) or name in ("refuse", "warnings.warn", "Refusal", "_must"):
            for part in ast.walk(called):
                if isinstance(part, ast.JoinedStr):
                    yield "".join(one.value if isinstance(one, ast.Constant) else "␣" for one in part.values)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


@cache
def found_sentences():
    """(file, sentence) of the whole source, sorted."""
    files = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    return sorted({(name, text) for name, tree in files.items() for text in sentences(tree)})


def exists(dotted):
    """Whether a dotted name is a module of ours or leads to something inside one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[1:cut])
        if cut > 1 and not (path.is_dir() or path.with_suffix(".py").is_file()):
            continue
        rest = parts[cut:]
        if not rest:
            return True
        if "engines" in parts[:cut]:  # engines may be missing, or half imported: the source must define the name
            source = path.with_suffix(".py")
            text = (source if source.is_file() else path / "__init__.py").read_text()
            return re.search(rf"\b{rest[0]}\b", text) is not None
        found = importlib.import_module(".".join(parts[:cut]))
        for part in rest:
            if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


def test_the_sentences_are_found():
    assert len(found_sentences()) > 200
    assert any("Try trustrl.preset" in text for _, text in found_sentences())


def test_dotted_names_in_errors_exist():
    named = [
        (dotted, file)
        for file, text in found_sentences()
        for dotted in re.findall(r"\btrustrl(?:\.[A-Za-z_]\w*)+", text)
    ]
    assert len(named) > 20
    for dotted, file in named:
        assert dotted in PLACEHOLDERS or exists(dotted), f"{file} names {dotted}"


def test_fields_of_records_in_errors_exist():
    for file, text in found_sentences():
        for owner, field in re.findall(r"\b([A-Z]\w+)\.([a-z]\w*)", text):
            if owner in RECORDS:
                home = regions if owner in regions.__all__ else trustrl
                assert field in {one.name for one in fields(getattr(home, owner))}, f"{file} names {owner}.{field}"


def test_commands_in_errors_exist():
    for file, text in found_sentences():
        for verb in re.findall(r"[`']trustrl ([a-z]+)", text):
            assert verb in VERBS, f"{file} names `trustrl {verb}`"


@pytest.mark.parametrize(
    "kind",
    [
        statistics.Divergence, statistics.Statistic, statistics.Ratio, statistics.SampledK2, terms.TIS, PrefixBudget, Region,
    ],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_a_setting_of_the_wrong_class_is_answered_with_classes_that_can_be_built(kind):
    with pytest.raises(trustrl.errors.ConfigError) as caught:
        validators.instance("setting", 3, (kind,))
    named = re.search(r"must be a ([\w, ]+), got", str(caught.value)).group(1).split(", ")
    assert named
    for name in [*named, re.search(r"trustrl\.regions\.(\w+)\(\)", str(caught.value)).group(1)]:
        assert issubclass(getattr(regions, name), kind)


def test_plain_tensors_in_place_of_records_are_answered_with_the_record():
    import torch

    logp = torch.zeros(1, 1)
    rollout = trustrl.RolloutTokens(behavior_logp=logp, advantage=torch.ones(1), in_loss=torch.ones(1, 1).bool())
    with pytest.raises(
        trustrl.errors.RecordError, match=r"policy must be a trustrl.PolicyTokens, got a Tensor\. .*PolicyTokens\("
    ):
        trustrl.policy_loss(logp, rollout, regions.DPPO(), reduction=trustrl.TokenSum())
    with pytest.raises(trustrl.errors.RecordError, match=r"rollout must be a trustrl.RolloutTokens, got a Tensor"):
        trustrl.check(trustrl.PolicyTokens(logp=logp), logp)
