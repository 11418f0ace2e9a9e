# SPDX-License-Identifier: Apache-2.0
"""What the built distributions must say and hold: run by `nox -s build` where they are installed."""

import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent


def faults(built: Distribution, declared: dict) -> list[str]:
    """What an installed distribution lacks, or says otherwise than its pyproject.toml."""
    metadata, name = built.metadata, declared["name"]
    package = name.replace("-", "_")
    files = {str(path) for path in built.files or ()}
    points = {(point.group, point.name, point.value) for point in built.entry_points}
    commands = declared.get("scripts", {})
    groups = {**declared.get("entry-points", {}), "console_scripts": commands}
    promised = {(group, key, value) for group, points in groups.items() for key, value in points.items()}
    checks = {
        "the version differs": built.version == declared["version"],
        "the licence is missing": metadata["License-Expression"] == declared["license"],
        "the licence file is missing": any(file.endswith("licenses/LICENSE") for file in files),
        "the Python floor is missing": metadata["Requires-Python"] == declared["requires-python"],
        "the README is missing": metadata["Description-Content-Type"] == "text/markdown"
        and bool(metadata.get_payload()),
        "the types are missing": f"{package}/py.typed" in files,
        "the module is missing": f"{package}/__init__.py" in files,
        "the dependencies differ": len(built.requires or ())
        == len(declared["dependencies"]) + sum(map(len, declared.get("optional-dependencies", {}).values())),
        "the entry points differ": points == promised,
        "something else is installed": all(
            file.startswith((f"{package}/", f"{package}-")) or Path(file).stem in commands for file in files
        ),
    }
    return [f"{name}: {fault}" for fault, holds in checks.items() if not holds]


def main(folder: Path) -> None:
    projects = sorted((*ROOT.glob("packages/*/pyproject.toml"), ROOT / "conformance" / "pyproject.toml"))
    found = []
    for path in projects:
        declared = tomllib.loads(path.read_text())["project"]
        stem = f"{declared['name'].replace('-', '_')}-{declared['version']}"
        for built in (f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"):
            if not (folder / built).is_file():
                found.append(f"{declared['name']}: no {built}")
        found += faults(distribution(declared["name"]), declared)
    if found:
        raise SystemExit("\n".join(found))
    print(f"{len(projects)} distributions: wheels, sdists and metadata are as declared")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
