"""Draw the pictures of docs/observability.md: `python scripts/draw_observability [NAME...]`; `--list` names them.

A real training run with a fault, a real Prometheus and Alertmanager, a receiver of OTLP, TensorBoard's own server and
a headless Chromium, all on loopback. Grafana and W&B's site cannot be had there: their pictures are previews, drawn
from the panels that this repository defines and the data that they would get.

Needs the extras lab and dev, and the system packages prometheus, prometheus-alertmanager, chromium and
chromium-driver. Takes two minutes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"

LIVE: Mapping[str, str] = {
    "watch.svg": "terminal:watch",
    "prometheus.png": "servers:prometheus",
    "alerts.png": "servers:alerts",
    "grafana.png": "grafana:overview",
}
"""File -> module and function that draw it while the run is there."""

AFTERWARDS: Mapping[str, str] = {
    "wandb.png": "tracker:section",
    "tensorboard.png": "servers:tensorboard",
    "otel.svg": "terminal:collector",
}
"""The same, once the run has ended."""


def main() -> None:
    """Draw what the command line names, by default everything."""
    files = {Path(file).stem: file for file in (*LIVE, *AFTERWARDS)}
    parser = argparse.ArgumentParser(prog="draw_observability")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(files)}; default: all")
    parser.add_argument("--list", action="store_true", help="print the files that would be drawn, and exit")
    args = parser.parse_args()
    if unknown := set(args.names) - set(files):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    chosen = [file for name, file in files.items() if not args.names or name in args.names]
    if args.list:
        print("\n".join(chosen))
    else:
        draw(chosen)


def draw(files: Iterable[str]) -> None:
    """Train once, and write the files."""
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(search)  # for the processes that train
    sys.path += [str(ROOT), str(ROOT / "scripts")]
    from browser import Browser
    from scene import scene

    with tempfile.TemporaryDirectory() as scratch, scene(Path(scratch)) as stage, Browser(Path(scratch)) as browser:
        write(files, LIVE, stage, browser)
        stage.end_run()
        write(files, AFTERWARDS, stage, browser)


def write(files: Iterable[str], table: Mapping[str, str], *to_draw_with: Any) -> None:
    """Write the files that a table has."""
    for file in files:
        if file in table:
            module, _, function = table[file].partition(":")
            made: bytes = getattr(importlib.import_module(module), function)(*to_draw_with)
            (IMAGES / file).write_bytes(made)
            print(f"{IMAGES / file}: {len(made) / 1024:.0f} KB")


if __name__ == "__main__":
    main()
