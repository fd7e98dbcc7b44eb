"""Fake interpreters with the packages that a test needs."""

import sys
from pathlib import Path


def fake_interpreter(
    folder: Path, *, sglang: str | None = "0.5.23", router: str | None = "0.3.2", plugin: bool = True
) -> Path:
    """A real Python whose site-packages hold empty distributions of these versions. Returns its path."""
    site = folder / "site"
    for name, version, points in (
        ("sglang", sglang, ""),
        ("sglang_router", router, ""),
        ("rlscale_sglang_cpu", "0.1.0" if plugin else None, "[sglang.srt.platforms]\nrlscale_cpu = a:b\n"),
    ):
        if version is not None:
            info = site / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            )
            (info / "entry_points.txt").write_text(points)
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def add_sglang(folder: Path, *, version: str, record: str) -> None:
    """Gives the interpreter of `folder` an importable `sglang` whose `ServerArgs` is the class body `record`."""
    package = folder / "site" / "sglang" / "srt"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (package / "__init__.py").write_text("")
    (package / "server_args.py").write_text(record)
