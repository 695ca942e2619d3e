"""The check for known vulnerabilities: what it finds, and that it never takes silence for good news."""

import io
import json
import urllib.error
import zipfile

import advisories
import environment_hashes
import pytest

JINJA = {
    "id": "PYSEC-CANARY",
    "affected": [{"package": {"ecosystem": "PyPI", "name": "Jinja2"}, "versions": ["2.4.1"], "ranges": []}],
}


def advisory(*events, name="some-engine", **more):
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}]
    return {"id": "GHSA-1", "affected": [{"package": {"ecosystem": "PyPI", "name": name}, "ranges": ranges}], **more}


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "engine.txt").write_text(f"Some_Engine==1.5 \\\n    --hash=sha256:{'a' * 64}\n")
    monkeypatch.setattr(environment_hashes, "FOLDERS", [folder])


def export(tmp_path, *entries):
    file = tmp_path / "all.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for at, entry in enumerate(entries):
            archive.writestr(f"{at}.json", json.dumps(entry))
    return str(file)


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        pytest.param(advisory({"introduced": "0"}), 1, id="never fixed"),
        pytest.param(advisory({"introduced": "1.0"}, {"fixed": "1.6"}), 1, id="fixed later"),
        pytest.param(advisory({"introduced": "0"}, {"fixed": "1.5"}), 0, id="fixed in this release"),
        pytest.param(advisory({"introduced": "0"}, {"last_affected": "1.5"}), 1, id="the last affected"),
        pytest.param(advisory({"fixed": "1.2"}, {"introduced": "0"}, {"introduced": "1.4"}), 1, id="came back"),
        pytest.param(advisory({"introduced": "1.10"}), 0, id="a later release"),
        pytest.param(advisory({"introduced": "0"}, name="another"), 0, id="another package"),
        pytest.param(advisory({"introduced": "0"}, withdrawn="2026-01-01"), 0, id="withdrawn"),
        pytest.param(
            {"id": "GHSA-2", "affected": [{"package": {"ecosystem": "npm", "name": "some-engine"}}]}, 0, id="npm"
        ),
    ],
)
def test_an_export_is_read_as_osv_describes_it(pinned, tmp_path, capsys, entry, code):
    assert advisories.main(["--database", export(tmp_path, JINJA, entry)]) == code
    assert ("some-engine==1.5: GHSA-1 (in engine)" in capsys.readouterr().out) is bool(code)


def answering(*results):
    def urlopen(request, timeout):
        assert request.full_url == advisories.SERVICE
        asked = json.loads(request.data)["queries"]
        assert asked[0] == {"package": {"ecosystem": "PyPI", "name": "some-engine"}, "version": "1.5"}
        return io.BytesIO(json.dumps({"results": list(results)}).encode())

    return urlopen


@pytest.mark.parametrize(
    ("results", "code"),
    [([{"vulns": [{"id": "GHSA-1"}]}, {"vulns": [{"id": "PYSEC-CANARY"}]}], 1), ([{}, {"vulns": [{"id": "X"}]}], 0)],
    ids=["an advisory", "none"],
)
def test_the_service_is_asked_about_every_pin(pinned, monkeypatch, results, code):
    monkeypatch.setattr(advisories.urllib.request, "urlopen", answering(*results))
    assert advisories.main([]) == code


def unreachable(request, timeout):
    raise urllib.error.URLError("no route")


@pytest.mark.parametrize(
    "urlopen",
    [unreachable, answering({}, {}), answering({}), lambda *_, **__: io.BytesIO(b"<html>a login page")],
    ids=["no network", "knows nothing, not even the canary", "answers half", "answers something else"],
)
def test_what_was_not_checked_is_said_with_a_code_of_its_own(pinned, monkeypatch, capsys, urlopen):
    monkeypatch.setattr(advisories.urllib.request, "urlopen", urlopen)
    assert advisories.main([]) == 3
    said = capsys.readouterr()
    assert "NOT CHECKED" in said.err
    assert "1 releases were not checked" in said.err
    assert said.out == ""


@pytest.mark.parametrize("entries", [(), (advisory({"introduced": "0"}),)], ids=["empty", "without the canary"])
def test_an_export_without_the_canary_is_not_believed(pinned, tmp_path, entries):
    assert advisories.main(["--database", export(tmp_path, *entries)]) == 3


def test_a_file_that_is_no_export_is_not_believed(pinned, tmp_path):
    (tmp_path / "page.html").write_text("not a zip file")
    assert advisories.main(["--database", str(tmp_path / "page.html")]) == 3
    assert advisories.main(["--database", str(tmp_path / "absent.zip")]) == 3
