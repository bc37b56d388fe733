"""An editable install, as `make quickstart` and the containers do it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_script_beside_a_clone_gets_the_package(tmp_path: Path) -> None:
    """Python prefers any package on the path to a folder of that name, but takes the folder before a finder's."""
    clone = tmp_path / "vissl_zero"
    (clone / "vissl_zero").mkdir(parents=True)
    (clone / "vissl_zero/__init__.py").write_text("embed = 1\n")
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "vissl_zero/version.py"):
        shutil.copy(ROOT / name, clone / name)
    build = "from setuptools.build_meta import build_editable; build_editable('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(clone.glob("dist/*.whl"))) as wheel:
        wheel.extractall(site)
    (tmp_path / "script.py").write_text(
        f"import site; site.addsitedir({str(site)!r}); import vissl_zero; print(vissl_zero.embed)"
    )
    # -S: this very environment's own installation must not come before it.
    command = [sys.executable, "-ES", tmp_path / "script.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"
