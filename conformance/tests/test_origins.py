# SPDX-License-Identifier: Apache-2.0
"""A run prints which files it tests, and does not start where Python could import two copies of the backend."""

import sys
from pathlib import Path
from typing import Any

import pytest
from ringattn_conformance import origins
from ringattn_core import Backend, Feature
from ringattn_core.backends.discovery import Registration

BACKEND = Backend("acme", 1, ("cpu",), (Feature.FLOAT32,), kernel="ringattn_acme_copy.block:KERNEL")
ACME = Registration("acme", BACKEND, "ringattn-acme-copy", "1.0")


def package(folder: Path) -> Path:
    (folder / "ringattn_acme_copy").mkdir(parents=True)
    (folder / "ringattn_acme_copy" / "__init__.py").touch()
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as of site-packages, with the package and the files of its distribution."""
    folder = package(tmp_path / "site")
    info = folder / "ringattn_acme_copy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ringattn-acme-copy\nVersion: 1.0\n")
    (info / "RECORD").write_text("ringattn_acme_copy/__init__.py,,\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_one_copy_is_tested_and_named(installed: Path):
    assert origins.file_of(ACME) == installed / "ringattn_acme_copy"
    assert origins.two_copies(ACME) is None


@pytest.mark.parametrize("first", ["installed", "development"])
def test_a_development_copy_on_pythonpath_beside_the_installed_one_is_refused(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
):
    """Whichever of the two Python imports: the run would test one, and its reader think of the other."""
    other = package(tmp_path / "development")
    monkeypatch.setenv("PYTHONPATH", str(other))
    if first == "development":
        monkeypatch.syspath_prepend(other)
    why: Any = origins.two_copies(ACME)
    assert str(installed) in why and str(other) in why and "pip install -e" in why


def test_a_copy_that_is_installed_as_editable_is_the_only_one(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (installed / "ringattn_acme_copy-1.0.dist-info" / "RECORD").write_text("_acme.pth,,\n")
    (installed / "ringattn_acme_copy" / "__init__.py").unlink()
    (installed / "ringattn_acme_copy").rmdir()
    other = package(tmp_path / "development")
    monkeypatch.setattr(sys, "path", [str(other), *sys.path])
    assert origins.file_of(ACME) == other / "ringattn_acme_copy"
    assert origins.two_copies(ACME) is None


def test_a_backend_of_this_process_has_no_files():
    assert origins.two_copies(Registration("own", BACKEND, "this process", "")) is None
