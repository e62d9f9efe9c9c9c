"""Gate: pyproject, package and changelog name the same version.

    python scripts/check_version.py [ROOT]

The newest section of the changelog is `## [VERSION] - DATE`, or `- unreleased` before the release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PLACES = {
    "pyproject.toml": r'^version = "([^"]+)"$',
    "tpwatch/__init__.py": r'^__version__(?:: [\w\[\]]+)? = "([^"]+)"$',
    "CHANGELOG.md": r"^## \[([^\]]+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$",
}


def version_in(path: Path, pattern: str) -> str:
    """The first version that the file states, or a remark that is equal to no version."""
    found = re.search(pattern, path.read_text() if path.is_file() else "", re.MULTILINE)
    return found.group(1) if found else "none found"


def main(arguments: list[str]) -> int:
    """Compare the versions under the root directory named on the command line."""
    root = Path(arguments[0] if arguments else ".")
    versions = {name: version_in(root / name, pattern) for name, pattern in PLACES.items()}
    agreed = len(set(versions.values())) == 1 and "none found" not in versions.values()
    for name, version in versions.items():
        print(f"{name}: {version}")
    print("version: ok" if agreed else "version: these must be equal")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
