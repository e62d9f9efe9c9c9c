"""Gate: no file of the repository names one machine's paths or a package registry's host.

    python scripts/check_text.py [ROOT]

Looks at what git tracks or would track. Paths under a home directory or another place that only one
machine has would break, or mislead, everywhere else; a registry is the user's choice.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = {
    "absolute path of one machine": re.compile(r"(?<![\w.:/~$}<-])/(?:home|mnt|root|scratch|srv|Users|work)/\w"),
    "host of a package registry": re.compile(r"pypi\.org|python[h]osted|pytorch\.org/whl|index-url[= ]+https?:"),
}


def tracked_files(root: Path) -> list[Path]:
    """Files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],  # noqa: S607 - git from PATH
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = (root / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def faults(path: Path) -> Iterator[str]:
    """Every line of a text file that breaks a rule."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        return
    for number, line in enumerate(lines, start=1):
        for rule, pattern in RULES.items():
            if pattern.search(line):
                yield f"{path}:{number}: {rule}: {line.strip()[:80]}"


def main(arguments: list[str]) -> int:
    """Check the repository named on the command line, by default the current directory."""
    files = tracked_files(Path(arguments[0] if arguments else "."))
    found = [fault for path in files for fault in faults(path)]
    print("\n".join(found) if found else f"text: ok ({len(files)} files)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
