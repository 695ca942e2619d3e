"""The page of licenses and the SBOM: made from what pip resolved, for the requirements that are declared today."""

import datetime
import hashlib
import json

import dependencies
import pytest
import sbom

DATA = json.loads(dependencies.DATA.read_text())
HINT = "Run `nox -s licenses`."


def test_the_requirements_that_were_resolved_are_those_that_are_declared():
    assert {extra: found["requires"] for extra, found in DATA["extras"].items()} == dependencies.extras(), HINT


def test_the_page_is_made_from_the_data():
    text = dependencies.PAGE.read_text()
    assert dependencies.page(DATA, text) == text, "Run `nox -s licenses -- --page`."


def test_every_package_of_an_extra_is_described_and_every_declared_one_is_there():
    for extra, found in DATA["extras"].items():
        assert set(found["direct"]) <= set(found["packages"]) <= DATA["packages"].keys()
        names = {dependencies.canonicalize_name(dependencies.Requirement(one).name) for one in found["requires"]}
        assert names <= {one.partition("==")[0] for one in found["packages"]}, extra


def test_the_core_brings_permissive_licenses_alone():
    core = DATA["extras"]["core"]["packages"]
    assert [one for one in core if not dependencies.permissive(DATA["packages"][one]["license"])] == []


@pytest.mark.parametrize(
    ("metadata", "found", "free"),
    [
        pytest.param({"license_expression": "MIT"}, "MIT", True, id="an expression"),
        pytest.param({"license_expression": "GPL-3.0-only OR MIT"}, "GPL-3.0-only OR MIT", True, id="a choice"),
        pytest.param({"license_expression": "MIT AND LGPL-2.1-only"}, "MIT AND LGPL-2.1-only", False, id="both"),
        pytest.param(
            {"license_expression": "MPL-2.0 AND (Apache-2.0 OR MIT)"}, "MPL-2.0 AND (Apache-2.0 OR MIT)", False,
            id="a choice beside copyleft",
        ),
        pytest.param(
            {"license_expression": "Apache-2.0 WITH LLVM-exception"}, "Apache-2.0 WITH LLVM-exception", True,
            id="an exception",
        ),
        pytest.param({"classifier": ["License :: OSI Approved :: MIT License"]}, "MIT", True, id="a classifier"),
        pytest.param(
            {"classifier": ["License :: OSI Approved", "License :: Other/Proprietary License"]},
            "Other/Proprietary License", False, id="proprietary",
        ),
        pytest.param({"license": "Apache License 2.0"}, "Apache-2.0", True, id="words"),
        pytest.param({"license": "NVIDIA Software License"}, "NVIDIA Software License", False, id="other words"),
        pytest.param({"license": "Copyright ... " * 99}, "unknown", False, id="a whole text"),
        pytest.param({}, "unknown", False, id="nothing"),
    ],
)  # fmt: skip
def test_a_license_is_read_and_flagged_unless_it_is_known_to_be_permissive(metadata, found, free):
    assert dependencies.license_of({"name": "some", **metadata})[0] == found
    assert dependencies.permissive(found) is free


def test_a_report_of_pip_becomes_packages_needs_and_extras(monkeypatch):
    declared = {"core": ["torch>=2"], "big": ["some[fast]>=1"]}
    monkeypatch.setattr(dependencies, "extras", lambda: declared)
    ours = {"name": "trustrl", "version": "0", "requires_dist": ["torch>=2", 'some[fast]>=1; extra == "big"']}
    torch = {"name": "torch", "version": "2.13.0+cpu", "license_expression": "BSD-3-Clause"}
    some = {
        "name": "Some",
        "version": "1.0",
        "license": "MIT",
        "requires_dist": ['quick; extra == "fast"', "no; python_version < '3'"],
    }
    quick = {"name": "quick", "version": "3", "license": "GPL"}
    environment = {"python_version": "3.11"}
    reports = {
        "core": {"environment": environment, "install": [{"metadata": one} for one in (ours, torch)]},
        "big": {"environment": environment, "install": [{"metadata": one} for one in (ours, torch, some, quick)]},
    }
    found = dependencies.resolved(reports, datetime.date(2026, 1, 1))
    assert found["extras"]["core"]["packages"] == ["torch==2.13.0"]
    assert found["extras"]["big"]["direct"] == ["some==1.0", "torch==2.13.0"]
    assert found["extras"]["big"]["packages"] == ["quick==3", "some==1.0", "torch==2.13.0"]
    assert found["packages"]["some==1.0"] == {"license": "MIT", "source": "text", "needs": ["quick==3"]}
    shown = dependencies.page(found, "before\n<!-- begin licenses -->\nstale\n<!-- end licenses -->\nafter\n")
    assert shown.startswith("before\n<!-- begin")
    assert shown.endswith("end licenses -->\nafter\n")
    assert "stale" not in shown
    assert "| `big` | 3 | `quick` |" in shown
    flagged, permissive = shown.split("## Permissive")
    assert "| `quick` | 3 | GPL | big |" in flagged
    assert "| `torch` | 2.13.0 | BSD-3-Clause | core, big |" in permissive


@pytest.fixture
def made(tmp_path):
    """The SBOM of a wheel, and the wheel."""
    wheel = tmp_path / "dist" / "trustrl-1.2.3-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"a wheel")
    wheel.with_name("trustrl_verl_cpu-1.2.3-py3-none-any.whl").write_bytes(b"the other package's wheel")
    assert sbom.main([str(wheel.parent), str(tmp_path / "sbom")]) == 0
    return json.loads((tmp_path / "sbom/trustrl-1.2.3.cdx.json").read_text()), wheel


def test_the_sbom_names_the_wheel_and_every_package(made):
    found, wheel = made
    about = found["metadata"]["component"]
    assert (about["purl"], found["bomFormat"], found["specVersion"]) == ("pkg:pypi/trustrl@1.2.3", "CycloneDX", "1.6")
    assert about["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    named = {f"{one['name']}=={one['version']}" for one in found["components"]}
    assert named == {"trustrl-verl-cpu==1.2.3", *DATA["packages"]}
    required = {f"{one['name']}=={one['version']}" for one in found["components"] if one["scope"] == "required"}
    assert required == set(DATA["extras"]["core"]["packages"])


def test_every_reference_in_the_sbom_leads_somewhere_and_every_package_is_reached(made):
    found, _ = made
    own = found["metadata"]["component"]["bom-ref"]
    edges = {one["ref"]: one["dependsOn"] for one in found["dependencies"]}
    assert edges.keys() == {own, *(one["bom-ref"] for one in found["components"])}
    reached, waiting = set(), [own]
    while waiting:
        if (one := waiting.pop()) not in reached:
            reached.add(one)
            waiting += edges[one]
    assert reached == edges.keys()


def test_the_same_wheel_has_the_same_sbom(made):
    found, wheel = made
    assert sbom.bom(wheel, DATA) == found
    wheel.write_bytes(b"another wheel")
    assert sbom.bom(wheel, DATA)["serialNumber"] != found["serialNumber"]


def test_the_sbom_is_valid(made):
    pytest.importorskip("cyclonedx")  # `nox -s build` has it, and checks the real one
    assert sbom.invalid(json.dumps(made[0])) == ""
    assert sbom.invalid(json.dumps({**made[0], "specVersion": "one"}))
