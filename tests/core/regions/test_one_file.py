"""A region is one file: equation, settings, a short decision and words. Other packages add files by entry point."""

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import trustrl
from support.worlds import run, world
from trustrl import regions
from trustrl.regions.base import AnchoredRegion
from trustrl.tools.report.reported_runs import region_in_words

FILES = {module.__name__.rpartition(".")[2]: module for module in regions.catalogue()}
ALL = {region.kind: region for module in FILES.values() for region in regions.classes(module)}

HALF = """
from dataclasses import dataclass
from typing import ClassVar

import trustrl


@dataclass(frozen=True)
class Half(trustrl.regions.Region):
    kind: ClassVar[str] = "test-half"
    bound: float = 0.5

    def axes(self):
        return trustrl.regions.TrustRegion(trustrl.regions.BinaryTV(max_increase=0.4))


PRESETS = {"test-half": Half, "test-quarter": lambda: Half(0.25)}
"""

USE = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
import trustrl
assert trustrl.config_from_dict({"kind": "test-half", "bound": 0.1}).bound == 0.1
assert "torch" not in sys.modules
assert {"test-half", "test-quarter", "ppo"} <= set(trustrl.presets())
assert trustrl.preset("test-quarter", bound=0.3).bound == 0.3
"""


def package(folder, name, text):
    """Writes a package with one module and an entry point to it."""
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{regions.GROUP}]\n{name} = {name}\n")


def used(folder):
    return subprocess.run([sys.executable, "-c", USE, str(folder)], capture_output=True, text=True, check=False)


def test_no_region_imports_torch_when_its_file_is_loaded():
    code = "import sys, trustrl.regions as r; assert len(r.catalogue()) > 15; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_an_equation_and_its_source(name):
    text = FILES[name].__doc__
    assert re.search(r"^    .*=", text, re.M), "an equation, indented"
    assert re.search(r"^References?: |There is no paper", text, re.M)


@pytest.mark.parametrize("kind", ALL)
def test_a_decision_is_short_and_a_region_describes_itself(kind):
    region = ALL[kind]
    assert "decide" in vars(region)
    source = inspect.getsource(region.decide).splitlines()
    assert len(source) <= (25 if kind == "trust-region" else 20)  # the general region is a choice between decisions
    settings = region(regions.BinaryTV()) if kind == "trust-region" else region()
    assert settings.words().endswith(".")


def test_the_folder_is_the_list_of_presets():
    """No preset and no kind has another origin."""
    names = [name for module in FILES.values() for name in regions.presets_of(module)]
    assert sorted(names) == trustrl.presets()
    assert {type(trustrl.preset(name)) for name in names} == set(ALL.values())


def test_axes_are_all_that_a_region_of_another_package_needs(tmp_path):
    package(tmp_path, "half_region", HALF)
    done = used(tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_package_that_cannot_be_loaded_is_named_and_left_out(tmp_path):
    package(tmp_path, "half_region", HALF)
    package(tmp_path, "broken_region", "raise OSError('no such disk')")
    done = used(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The entry point 'broken_region' of trustrl.regions must be a module" in done.stderr
    assert "OSError: no such disk" in done.stderr


def test_a_package_whose_names_are_taken_is_named_and_left_out(tmp_path):
    package(tmp_path, "half_region", HALF)
    package(tmp_path, "a_second_dppo", HALF.replace("test-half", "dppo").replace("test-quarter", "ppo"))
    done = used(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The regions of a_second_dppo must have names that no other region has." in done.stderr
    assert "'dppo' is already registered" in done.stderr


@dataclass(frozen=True)
class ByAxes(regions.Region):
    """A point on the axes, with a correction there."""

    kind: ClassVar[str] = "test-by-axes"

    def axes(self):
        return regions.TrustRegion(
            regions.BinaryTV(max_increase=0.1), anchor="proximal", correction=regions.TIS(max_ratio=1.05)
        )


def test_a_class_with_axes_alone_decides_needs_and_says_what_its_point_does():
    region, point, w = ByAxes(), ByAxes().axes(), world(3, drift=0.3, rows=8)
    (ours, _), (theirs, _) = run(region, w), run(point, w)
    assert not theirs.decision.keep.all()
    assert torch.equal(ours.decision.keep, theirs.decision.keep)
    assert torch.equal(ours.decision.weight, theirs.decision.weight)
    assert ours.decision.extra["correction"].max() == 1.05
    assert region.needs() == point.needs()
    assert region_in_words(region, {}) == point.words()


def test_a_report_lists_the_settings_of_a_region_without_words():
    class Bare(AnchoredRegion):
        kind = "test-bare"

    assert Bare().axes() is None
    assert region_in_words(Bare(), {"kind": "test-bare", "x": 1}) == "test-bare: x = 1."


def test_a_correction_multiplies_the_decision_of_any_region_with_that_setting():
    @dataclass(frozen=True, slots=True)
    class Plain(AnchoredRegion):
        kind: ClassVar[str] = "test-plain"

        def needs(self):
            return regions.PolicyGradient(anchor=self.anchor, correction=self.correction).needs()

        def decide(self, tokens):
            keep = torch.ones_like(tokens.usable)
            return regions.Decision(keep, torch.full_like(tokens.log_ratio, 2.0), tokens.logp)

    w = world(3, drift=0.2, rows=8)
    out, _ = run(Plain(anchor="proximal", correction=regions.TIS(max_ratio=1.01)), w)
    factor = (w.at_token(w.proximal) - w.at_token(w.behavior)).exp().clamp(max=1.01)
    torch.testing.assert_close(out.decision.weight[w.in_loss], 2 * factor[w.in_loss], rtol=1e-12, atol=0)
