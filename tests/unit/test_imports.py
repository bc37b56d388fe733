"""Garbage is not collected while modules are imported, and is afterward as before."""

from __future__ import annotations

import gc
import sys

import pytest

from vissl_zero.imports import import_at_once


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("last_line", ["", "raise ValueError"])
def test_collections_pause_for_an_import_alone(was_enabled, last_line, tmp_path, monkeypatch):
    (tmp_path / "imported_at_once.py").write_text(f"import gc\nis_enabled = gc.isenabled()\n{last_line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "imported_at_once", raising=False)
    (gc.enable if was_enabled else gc.disable)()
    try:
        if last_line:
            with pytest.raises(ValueError):
                import_at_once("imported_at_once")
        else:
            assert not import_at_once("imported_at_once").is_enabled
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
        sys.modules.pop("imported_at_once", None)
