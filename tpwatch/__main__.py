"""`python -m tpwatch`: the same as the `tpwatch` command."""

from __future__ import annotations

import sys

from tpwatch.cli import main

sys.exit(main())
