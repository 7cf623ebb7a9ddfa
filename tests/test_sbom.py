"""The bill of materials names what is installed."""

from importlib import metadata

from ssfl.runs import sbom


def test_the_bill_names_every_package_that_ssfl_needs_with_its_version() -> None:
    bill, _ = sbom.describe(["flower"])
    parts = {one["name"]: one["version"] for one in bill["components"]}
    for name in ("torch", "numpy", "safetensors", "typer", "flwr", "cryptography"):
        assert parts[name] == metadata.version(name)
    assert "pytest" not in parts
    assert "flwr" not in {one["name"] for one in sbom.describe()[0]["components"]}
    refs = {one["bom-ref"] for one in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert all(one["ref"] in refs and set(one["dependsOn"]) <= refs for one in bill["dependencies"])
    own = next(one for one in bill["dependencies"] if one["ref"].startswith("pkg:pypi/ssfl@"))
    assert f"pkg:pypi/torch@{parts['torch']}" in own["dependsOn"]
