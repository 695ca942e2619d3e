"""Files for contributors and releases: they parse, call sessions that exist, and agree on versions and addresses."""

import re
import tomllib
from datetime import date
from pathlib import Path

import pytest
import set_repository

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
if not WORKFLOWS:
    pytest.skip("needs a checkout", allow_module_level=True)

yaml = pytest.importorskip("yaml")
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOXFILE = (ROOT / "noxfile.py").read_text()
SESSIONS = set(re.findall(r"^@nox\.(?:session|parametrize)\(.*\)\ndef (\w+)\(", NOXFILE, re.M))
YAMLS = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow):
    return [step["run"] for job in read(workflow)["jobs"].values() for step in job["steps"] if "run" in step]


def matrix(workflow, name):
    return [
        one
        for job in read(workflow)["jobs"].values()
        for one in job.get("strategy", {}).get("matrix", {}).get(name, [])
    ]


def called(workflow):
    """Sessions that a workflow runs, with the matrix filled in."""
    found = set()
    for line in commands(workflow):
        for names in re.findall(r"nox -s (.+?)(?: -- .*)?$", line, re.M):
            for filled in matrix(workflow, "sessions") if "matrix.sessions" in names else [names]:
                found |= {re.split(r"[-(]", name.strip('"'))[0] for name in filled.split() if not name.startswith("$")}
    return {name for name in found if name.isidentifier()}


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_every_yaml_file_parses(path):
    assert isinstance(read(path), dict)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_sessions_that_exist(workflow):
    assert called(workflow)
    assert called(workflow) <= SESSIONS


def test_the_ci_workflow_runs_every_session_that_nox_runs_unasked():
    (unasked,) = re.findall(r"nox\.options\.sessions = \[(.*?)\]", NOXFILE, re.S)
    assert called(ROOT / ".github/workflows/ci.yml") >= {*re.findall(r'"(\w+)"', unasked), "torch_versions"}


def test_the_ci_workflow_has_the_python_and_torch_versions_of_the_session_it_calls():
    pythons, torches = re.search(
        r"python=(\[[^]]+\])\)\n@nox\.parametrize\(\"torch\", (\[[^]]+\])\)\ndef torch_versions", NOXFILE
    ).groups()
    workflow = ROOT / ".github/workflows/ci.yml"
    assert matrix(workflow, "python") == re.findall(r"[\d.]+", pythons)
    assert matrix(workflow, "torch") == re.findall(r"[\d.]+", torches)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_grant_no_more_than_reading_unless_a_job_asks(workflow):
    assert read(workflow)["permissions"] == {"contents": "read"}


def test_the_release_is_published_without_a_token_after_build_check_and_attestation():
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    uses = [step.get("uses", step.get("run")) for step in jobs["build"]["steps"]]
    assert uses.index("nox -s build") < next(i for i, one in enumerate(uses) if one.startswith("actions/attest"))
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_by_commit_and_tools_by_hash(workflow):
    uses = re.findall(r"^ *(?:- )?uses: (.+)$", workflow.read_text(), re.M)
    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    installs = {line for line in commands(workflow) if "pip install" in line}
    assert installs == {"pip install --require-hashes --no-deps -r .github/locks/nox.txt"}


@pytest.mark.parametrize("name", ["build", "docs"])
def test_a_lock_has_what_its_group_names(name):
    lock = (ROOT / f".github/locks/{name}.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s\\]+)", lock, re.M))
    for one in TOML["dependency-groups"][name]:
        package, rule, version = re.fullmatch(r"([\w-]+)(?:\[[\w-]+\])?(==|>=)([\d.]+)", one).groups()
        assert rule == ">=" or pinned[package] == version
        assert package in pinned


def test_pre_commit_runs_the_ruff_of_the_lint_group():
    hooks = {repo["repo"].rpartition("/")[2]: repo for repo in read(ROOT / ".pre-commit-config.yaml")["repos"]}
    (pinned,) = (one for one in TOML["dependency-groups"]["lint"] if one.startswith("ruff=="))
    assert hooks["ruff-pre-commit"]["rev"] == f"v{pinned.removeprefix('ruff==')}"
    for hook in hooks["local"]["hooks"]:
        script = hook["entry"].split()[1]
        assert (ROOT / script).is_file()
        assert f'"{script}"' in NOXFILE, "lint runs it too"


@pytest.mark.parametrize("package", ["ruff", "pyright", "import-linter", "pylint"])
def test_the_lint_group_pins_exact_versions(package):
    assert any(re.fullmatch(rf"{package}==[\d.]+", one) for one in TOML["dependency-groups"]["lint"])


def test_one_version_everywhere():
    version = TOML["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "src/trustrl/__init__.py").read_text()
    assert read(ROOT / "CITATION.cff")["version"] == version
    released = re.search(rf"^## {re.escape(version)} \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert read(ROOT / "CITATION.cff")["date-released"] == date.fromisoformat(released[1])


def test_both_packages_have_the_same_version_and_require_each_other_at_it():
    """The package for CPUs calls trustrl's own modules, which may change in any release."""
    version = TOML["project"]["version"]
    rig = tomllib.loads((ROOT / "packages/verl_cpu/pyproject.toml").read_text())["project"]
    assert rig["version"] == version
    assert rig["dependencies"] == [f"trustrl=={version}"]
    assert TOML["project"]["optional-dependencies"]["verl-cpu"] == [f"{rig['name']}=={version}"]


def test_both_packages_have_the_same_license_addresses_and_python():
    rig = ROOT / "packages/verl_cpu"
    assert (rig / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    declared = tomllib.loads((rig / "pyproject.toml").read_text())["project"]
    assert {name: declared[name] for name in ("urls", "license", "requires-python", "classifiers")} == {
        name: TOML["project"][name] for name in ("urls", "license", "requires-python", "classifiers")
    }


def test_the_address_of_the_repository_has_one_spelling_everywhere():
    assert set_repository.other_addresses() == []
    repository = set_repository.current()
    assert all(url.startswith(repository) for url in TOML["project"]["urls"].values())
    assert read(ROOT / "CITATION.cff")["repository-code"] == repository


def test_one_command_writes_the_address_of_the_repository_in_every_file(tmp_path):
    repository = set_repository.current()
    for file in set_repository.files():
        text = file.read_text(encoding="utf-8")
        if repository in text:
            copy = tmp_path / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
    changed = set_repository.write("someone/trustrl", tmp_path)
    assert {"pyproject.toml", "packages/verl_cpu/pyproject.toml", "CITATION.cff", "SECURITY.md"} <= {*changed}
    assert set_repository.problems(tmp_path) == []
    assert set_repository.write(repository.removeprefix(set_repository.HOST), tmp_path) == changed
    for name in changed:
        assert (tmp_path / name).read_text(encoding="utf-8") == (ROOT / name).read_text(encoding="utf-8")


def test_a_placeholder_and_a_second_spelling_stop_a_release(tmp_path):
    placeholder, other = (f"{set_repository.HOST}{name}/trustrl" for name in ("OWNER", "another"))
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "{placeholder}"\n')
    (tmp_path / "SECURITY.md").write_text(f"{other}/issues")
    assert set_repository.problems(tmp_path) == [f"{placeholder} is a placeholder.", f"SECURITY.md has {other}."]


def test_the_templates_link_to_headings_that_exist():
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith("#")
    }
    for path in sorted((ROOT / ".github").rglob("*.*")):
        for anchor in re.findall(r"CONTRIBUTING\.md#([\w-]+)", path.read_text()):
            assert anchor in headings, (path, anchor)


def test_the_site_asks_for_versions_only_where_mike_builds_it():
    page = (ROOT / "mkdocs.yml").read_text()
    assert "provider: !ENV [TRUSTRL_DOCS_VERSIONS, none]" in page
    assert '"TRUSTRL_DOCS_VERSIONS": "mike"' in NOXFILE
    assert any(re.fullmatch(r"mike==[\d.]+", one) for one in TOML["dependency-groups"]["docs"])


def test_the_changelog_moves_modules_and_names_to_paths_that_exist():
    blocks = re.findall(r"^<!-- begin \w+ -->$(.*?)^<!-- end", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S)
    rows = re.findall(r"^\| (`trustrl[\w.]*`) \| (.+) \|$", "".join(blocks), re.M)
    assert len(rows) > 100
    for old, now in rows:
        assert now != old
        for name in re.findall(r"`([\w.]+)`", now):
            assert is_module(name) or is_defined(*name.rsplit(".", 1)), (old, name)


def source_of(name):
    return ROOT / ("packages/verl_cpu/src" if name.startswith("trustrl_verl_cpu") else "src") / name.replace(".", "/")


def is_module(name):
    path = source_of(name)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def is_defined(module, name):
    path = source_of(module)
    path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".py")
    return re.search(rf"\b{name}\b", path.read_text()) is not None
