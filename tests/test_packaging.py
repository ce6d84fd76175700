"""templates/ and grammar/ are part of a checkout and of an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mbc.resources import folder
from mbc.version import __version__

ROOT = Path(__file__).resolve().parents[1]
_REPORT = (
    "import json, mbc.resources as r; from mbc.hardware.spec import device_specs; device_specs(); "
    "print(json.dumps({n: sorted(p.name for p in r.folder(n).rglob('*') if p.is_file()) "
    "for n in ('templates', 'grammar')} | {'at': r.__file__}))"
)


def _files(name: str) -> list[str]:
    return sorted(path.name for path in (ROOT / name).rglob("*") if path.is_file())


def test_checkout():
    assert folder("templates") == ROOT / "templates"
    assert folder("grammar") == ROOT / "grammar"
    with pytest.raises(FileNotFoundError, match="reinstall mbc-compiler"):
        folder("nothing")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return a wheel, built with the installed hatchling, so that no network is needed."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run([*command, "--wheel-dir", str(out), str(ROOT)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("*.whl")
    return file


def test_wheel_is_whole(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name.startswith(f"mbc_compiler-{__version__}-py3-none-any")
    for name in ("templates", "grammar"):
        for path in (ROOT / name).rglob("*"):
            if path.is_file():
                assert f"mbc/{path.relative_to(ROOT).as_posix()}" in names
    for path in (ROOT / "mbc").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in names
    assert not any(name.startswith(("tests/", "templates/", "grammar/", "benchmarks/")) for name in names)


def test_installed_wheel_finds_its_files(wheel, tmp_path):
    import json

    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    # A folder of that name beside the package is somebody else's.
    (site / "templates").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", _REPORT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    installed = json.loads(done.stdout)
    assert Path(installed["at"]) == site / "mbc" / "resources.py"
    assert installed["templates"] == _files("templates")
    assert installed["grammar"] == _files("grammar")
    assert (site / "bin" / "mbc").exists()
