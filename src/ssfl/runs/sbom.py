"""Writes a software bill of materials (SBOM): the installed packages that ssfl needs, as CycloneDX JSON.

python -m ssfl.runs.sbom [EXTRA ...] > sbom.json

Only the metadata of installed packages are read. The requirements of ssfl and of the named extras are
followed. Packages that are not installed are left out, and listed on standard error.
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?$")


def plain(name: str) -> str:
    """Returns the normalised name of a package, as PyPI uses it: lower case, with hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(extras: Iterable[str]) -> tuple[dict[str, metadata.Distribution], dict[str, set[str]], set[str]]:
    """Returns three things about ssfl with these extras. The first are the installed packages that it needs,
    by name. The second maps each of them to the packages that it requires. The third are required packages
    that are not installed."""
    packages: dict[str, metadata.Distribution] = {}
    edges: dict[str, set[str]] = {}
    missing: set[str] = set()
    done: set[tuple[str, str]] = set()
    left = [("ssfl", extra) for extra in ("", *extras)]
    while left:
        name, extra = left.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        try:
            package = packages.setdefault(name, metadata.distribution(name))
        except metadata.PackageNotFoundError:
            missing.add(name)
            continue
        edges.setdefault(name, set())
        for line in package.requires or []:
            match = REQUIREMENT.match(line)
            if match is None or not _applies(match[4], extra):
                continue
            other = plain(match[1])
            edges[name].add(other)
            left += [(other, other_extra.strip()) for other_extra in (match[2] or "").split(",")]
            left.append((other, ""))
    return packages, edges, missing


def _applies(marker: str | None, extra: str) -> bool:
    """Returns whether a requirement belongs to this extra, or, if `extra` is "", to the package without
    extras. `marker` is the condition after the semicolon of the requirement. Conditions on the platform are
    ignored."""
    named = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker or "")
    return plain(named[1]) == plain(extra) if named else not extra


def describe(extras: Iterable[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """Returns the bill of materials as a CycloneDX object, and the names of required packages that are not
    installed."""
    packages, edges, missing = needed(extras)
    parts = []
    for name, package in sorted(packages.items()):
        fields = package.metadata
        licence = next((fields[key] for key in ("License-Expression", "License") if key in fields), "")
        component: dict[str, Any] = {
            "type": "application" if name == "ssfl" else "library",
            "bom-ref": f"pkg:pypi/{name}@{package.version}",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version}",
        }
        if licence and len(licence) < 100:
            component["licenses"] = [{"license": {"name": licence}}]
        parts.append(component)
    refs = {component["name"]: component["bom-ref"] for component in parts}
    software = next(component for component in parts if component["name"] == "ssfl")
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": software},
        "components": [component for component in parts if component is not software],
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[other] for other in others if other in refs)}
            for name, others in sorted(edges.items())
        ],
    }
    return bill, missing


def main() -> None:
    bill, missing = describe(sys.argv[1:])
    if missing:
        print(f"not installed here: {', '.join(sorted(missing))}", file=sys.stderr)
    print(json.dumps(bill, indent=1))


if __name__ == "__main__":
    main()
