"""Declare the optional compiled fingerprint; everything else is in pyproject.toml.

The extension only makes the plain-torch reference faster. A machine without a compiler gets a
warning and a working package.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "tpwatch/fingerprint/_native.c"
PYTHON_FLOOR = "0x030A0000"  # the stable ABI of Python 3.10, so that one wheel serves all later ones


def native_extensions() -> list[Extension]:
    """The extensions that can be built from this tree: one, or none with a warning."""
    if not (Path(__file__).parent / SOURCE).is_file():
        warnings.warn(f"{SOURCE} is missing: tpwatch is built without it", stacklevel=2)
        return []
    return [
        Extension(
            "tpwatch.fingerprint._native",
            [SOURCE],
            depends=[str(header) for header in sorted(Path("tpwatch/fingerprint").glob("*.h"))],
            define_macros=[("Py_LIMITED_API", PYTHON_FLOOR)],
            # No -ffast-math and no contraction: columns must match the reference.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
            py_limited_api=True,
        ),
    ]


setup(
    ext_modules=native_extensions(),
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
