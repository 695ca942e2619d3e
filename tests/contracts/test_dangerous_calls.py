"""The package's own code never unpickles, evaluates or executes data, and starts no shell. What comes close is listed."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src/trustrl", ROOT / "packages/verl_cpu/src")
PICKLES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "runpy", "code"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
STARTS = {"Popen", "run", "call", "check_call", "check_output"}

ALLOWED = {
    ("engines/openrlhf/launcher.py", "import runpy"): "runs OpenRLHF's own module, as `python -m` would",
    ("engines/trl/__main__.py", "import runpy"): "runs the training script that the user names, as `python` would",
    ("runner/git_commit.py", "subprocess"): "git, without the programs that a repository names",
    ("runner/grid.py", "subprocess"): "a cell of a comparison: this Python with trustrl's own command line",
    ("runner/verl_run.py", "subprocess"): "verl: this Python with the recipe's settings as separate arguments",
    ("trustrl_verl_cpu/vllm_server.py", "subprocess"): "asks the Python that the user named for its versions",
    ("world/rewards/judges.py", "subprocess"): "a reward function: this Python with a module of trustrl",
    ("world/wheels.py", "subprocess"): "pip, for wheels whose SHA-256 is checked",
}
"""Where the package starts a process or a program, and which."""


def named(call):
    """The name of what a call calls, such as ("torch", "load") or ("", "eval")."""
    match call.func:
        case ast.Name(id=name):
            return "", name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return owner, name
        case ast.Attribute(attr=name):
            return "?", name
    return "?", "?"


def keyword(call, name):
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), None)


def dangers(text):
    """What comes close to running data, in one file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {one}" for one in modules if one.partition(".")[0] in PICKLES)
        if not isinstance(node, ast.Call):
            continue
        owner, name = named(node)
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if (owner, name) in {("", one) for one in RUNS_TEXT} | SHELLS:
            yield name
        elif name in {"import_module", "require"} and first in PICKLES:
            yield f"import {first}"
        elif name in STARTS and owner == "subprocess":
            yield "subprocess"
            if keyword(node, "shell") not in (None, "False"):
                yield "shell"
        elif name == "load" and owner == "torch" and keyword(node, "weights_only") != "True":
            yield "torch.load"
        elif name == "load" and owner == "yaml" and "SafeLoader" not in (keyword(node, "Loader") or ""):
            yield "yaml.load"
        elif name in {"unsafe_load", "full_load", "from_pickle", "read_pickle", "Unpickler"}:
            yield name
        if keyword(node, "allow_pickle") not in (None, "False"):
            yield "allow_pickle"
        if keyword(node, "trust_remote_code") == "True":
            yield "trust_remote_code"


def test_the_package_runs_no_data():
    found = set()
    for source in SOURCES:
        for file in sorted(source.rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            found |= {(str(file.relative_to(source)), danger) for danger in dangers(text)}
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("line", "danger"),
    [
        ("import pickle", "import pickle"),
        ("from dill import loads", "import dill"),
        ("import_module('cloudpickle')", "import cloudpickle"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("compile(text, '', 'exec')", "compile"),
        ("os.system('ls')", "system"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("subprocess.Popen(words)", "subprocess"),
        ("torch.load(file)", "torch.load"),
        ("torch.load(file, weights_only=False)", "torch.load"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("yaml.unsafe_load(text)", "unsafe_load"),
        ("np.load(file, allow_pickle=True)", "allow_pickle"),
        ("pd.read_pickle(file)", "read_pickle"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust_remote_code"),
    ],
)
def test_each_danger_is_found(line, danger):
    assert danger in set(dangers(line))


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()", "re.compile(text)", "torch.compile(function)", "torch.load(file, weights_only=True)",
        "ast.literal_eval(text)", "yaml.load(text, Loader=getattr(yaml, 'CSafeLoader', yaml.SafeLoader))", "run(options)",
    ],
)  # fmt: skip
def test_what_is_harmless_is_not(line):
    assert list(dangers(line)) == []
