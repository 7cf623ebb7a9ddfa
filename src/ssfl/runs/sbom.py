"""A bill of materials: what is installed here that ssfl needs, as CycloneDX JSON.

python -m ssfl.runs.sbom [EXTRA ...] > sbom.json

It reads the metadata of installed packages alone, and follows the requirements of ssfl and of the extras that
are named; what is not installed is left out and told on standard error.
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?$")


def plain(name: str) -> str:
    """A package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(extras: Iterable[str]) -> tuple[dict[str, metadata.Distribution], dict[str, set[str]], set[str]]:
    """The packages that ssfl needs, what each needs itself, and those that are not installed."""
    found: dict[str, metadata.Distribution] = {}
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
            package = found.setdefault(name, metadata.distribution(name))
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
            left += [(other, more.strip()) for more in (match[2] or "").split(",")]
            left.append((other, ""))
    return found, edges, missing


def _applies(marker: str | None, extra: str) -> bool:
    """Whether a requirement belongs to this extra; conditions on the machine are taken as met."""
    named = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker or "")
    return plain(named[1]) == plain(extra) if named else not extra


def describe(extras: Iterable[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """The bill, and what is not installed."""
    found, edges, missing = needed(extras)
    parts = []
    for name, package in sorted(found.items()):
        told = package.metadata
        licence = next((told[key] for key in ("License-Expression", "License") if key in told), "")
        one: dict[str, Any] = {
            "type": "application" if name == "ssfl" else "library",
            "bom-ref": f"pkg:pypi/{name}@{package.version}",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version}",
        }
        if licence and len(licence) < 100:
            one["licenses"] = [{"license": {"name": licence}}]
        parts.append(one)
    refs = {one["name"]: one["bom-ref"] for one in parts}
    own = next(one for one in parts if one["name"] == "ssfl")
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [one for one in parts if one is not own],
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
