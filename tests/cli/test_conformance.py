"""`trustrl conformance`: exit codes, JSON, and where losses are looked for."""

import json
import sys
from pathlib import Path

import pytest

from trustrl.cli import main

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def _beside_the_losses(monkeypatch):
    """As in a user's own project: the module lies in the working folder."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(HERE)])


def test_a_sound_loss_ends_with_0_and_talk_is_on_stderr(capsys):
    assert main(["conformance", "losses_under_test:dppo", "--kind", "dppo"]) == 0
    said = capsys.readouterr()
    assert "0 fails, 0 differs" in said.out
    assert "adapter plain, kind dppo" in said.err


def test_a_failing_loss_ends_with_1_and_says_expected_and_got(capsys):
    assert main(["conformance", "losses_under_test:stops_what_comes_back", "--kind", "dppo"]) == 1
    said = capsys.readouterr().out
    assert "fails    outside, risen, pulled back" in said
    assert "expected  kept: weight 2.833" in said
    assert "got       weight 0" in said


def test_json_has_every_row_and_the_settings(capsys):
    assert main(["conformance", "losses_under_test:dppo", "bound=0.3", "--kind", "dppo", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["adapter"], made["kind"], made["settings"]) == ("plain", "dppo", {"bound": 0.3})
    assert sum(made["counts"].values()) == len(made["results"])
    differing = [row for row in made["results"] if row["verdict"] == "differs"]
    assert [row["case"] for row in differing] == ["bounds with these settings"]
    assert "0.3" in differing[0]["got"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["losses_under_test"], 2, "package.module:function", id="no function"),
        pytest.param(["nowhere_at_all:f"], 2, "must be importable", id="no module"),
        pytest.param(["losses_under_test:of_four"], 2, "--adapter plain", id="unknown parameters"),
        pytest.param(["losses_under_test:dppo", "--kind", "trpo"], 2, "invalid choice", id="unknown kind"),
        pytest.param(["losses_under_test:dppo", "bound"], 2, "must have the form", id="a setting without a value"),
        pytest.param(["losses_under_test:needs_a_setting"], 1, "valid batch", id="a loss that does not run"),
    ],
)
def test_what_cannot_be_judged_ends_with_a_sentence(arguments, code, said, capsys):
    assert main(["conformance", *arguments]) == code
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""
