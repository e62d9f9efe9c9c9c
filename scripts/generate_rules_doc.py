"""Write docs/rules.md from the rules in the package: `python scripts/generate_rules_doc.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "rules.md"


def main() -> None:
    """Replace the page."""
    sys.path.insert(0, str(ROOT))
    from tpwatch.cli.rules import rules_markdown
    from tpwatch.diagnose.rules import RULES

    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(rules_markdown(RULES), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
