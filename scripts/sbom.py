"""Software bill of materials of a release: CycloneDX 1.6, as JSON.

    python scripts/sbom.py --check dist build/sbom    # from trustrl's wheel in dist/ and docs/data/dependencies.json

The packages are those that pip resolved for each extra when the data were written. The wheel itself requires ranges, so
an installation may have other versions. The same wheel gives the same file.
"""

import argparse
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dependencies import CORE, DATA, RIG
from packaging.utils import parse_wheel_filename

SPDX_EXPRESSION = re.compile(r"\(| (?:AND|OR|WITH) ")
NO_SPDX_NAME = frozenset({"BSD", "LGPL", "unknown"})


def bom(wheel: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bill of materials of a wheel."""
    name, version, *_ = parse_wheel_filename(wheel.name)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own, rig = _purl(f"{name}=={version}"), _rig(str(version))
    extras = data["extras"]
    direct = sorted({one for found in extras.values() for one in found["direct"]})
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": own, "name": name, "version": str(version), "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
        },
        "components": [rig, *(_component(key, about, extras) for key, about in data["packages"].items())],
        "dependencies": [
            {"ref": own, "dependsOn": [rig["bom-ref"], *map(_purl, direct)]},
            {"ref": rig["bom-ref"], "dependsOn": [own]},
            *(
                {"ref": _purl(key), "dependsOn": [_purl(one) for one in about["needs"]]}
                for key, about in data["packages"].items()
            ),
        ],
    }  # fmt: skip


def _rig(version: str) -> dict[str, Any]:
    """Returns trustrl's own package for verl on a CPU, which is built with it and has its version."""
    purl = _purl(f"{RIG}=={version}")
    return {
        "type": "library", "bom-ref": purl, "name": RIG, "version": version, "purl": purl, "scope": "optional",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "properties": [{"name": "trustrl:extras", "value": "verl-cpu"}],
    }  # fmt: skip


def _component(key: str, about: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    name, version = key.split("==")
    users = [extra for extra, found in extras.items() if key in found["packages"]]
    return {
        "type": "library", "bom-ref": _purl(key), "name": name, "version": version, "purl": _purl(key),
        "scope": "required" if CORE in users else "optional",
        "licenses": [_license(about)],
        "properties": [{"name": "trustrl:extras", "value": ", ".join(users)}],
    }  # fmt: skip


def _license(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a license as SPDX expression or name if it is one, and else by the package's own words."""
    found = about["license"]
    if SPDX_EXPRESSION.search(found):
        return {"expression": found} if about["source"] == "expression" else {"license": {"name": found}}
    return {"license": {"name" if found in NO_SPDX_NAME or " " in found else "id": found}}


def _purl(key: str) -> str:
    return "pkg:pypi/{}@{}".format(*key.split("=="))


def invalid(text: str) -> str:
    """Returns the first fault by CycloneDX's strict schema, or an empty string."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return str(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) or "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file. `out` must not be `dist`, all of which is uploaded to PyPI."""
    parser = argparse.ArgumentParser(description="Write the SBOM of trustrl's wheel.")
    parser.add_argument("--check", action="store_true", help="Validate it with cyclonedx-python-lib.")
    parser.add_argument("dist", type=Path, help="The folder with the wheel.")
    parser.add_argument("out", type=Path, help="The folder to write to.")
    chosen = parser.parse_args(arguments)
    (wheel,) = chosen.dist.glob("trustrl-*.whl")
    found = bom(wheel, json.loads(DATA.read_text(encoding="utf-8")))
    about = found["metadata"]["component"]
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / f"{about['name']}-{about['version']}.cdx.json"
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if chosen.check and (wrong := invalid(file.read_text(encoding="utf-8"))):
        print(f"error: {file} is not valid: {wrong}", file=sys.stderr)
        return 1
    print(f"{file}: {len(found['components'])} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
