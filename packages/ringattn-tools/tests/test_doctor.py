# SPDX-License-Identifier: Apache-2.0
"""Promises of `ringattn doctor`: it names each fault and its remedy, and exits with 1 if something is broken."""

import platform
import sys
from typing import Any

import jax
import pytest
from ringattn_tools import doctor
from ringattn_tools.main import main


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def test_where_all_is_well_it_says_what_is_there_and_which_backend_answers(add, capsys, monkeypatch) -> None:
    add("good")
    add("better", priority=3)
    add("elsewhere", platforms=("tpu",))
    monkeypatch.setenv("RINGATTN_AUTOTUNE", "off")
    status, out = said(capsys)
    assert status == 0 and "no faults" in out
    versions = (f"python {platform.python_version()}", f"jax {jax.__version__}")
    states = ("better works, and is the default", "good works", "elsewhere is not for cpu")
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert lines.issuperset((*versions, *states, "cpu 8 x cpu", "RINGATTN_AUTOTUNE off")), out


FAULTS: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "a probe that refuses": (
        {"probe": "bad_block:unsound"},
        False,
        "backend 'bad' cannot run here: no such device in the house",
        "name another one",
    ),
    "a probe that raises": (
        {"probe": "bad_block:crash"},
        True,
        "is broken: its probe bad_block:crash failed: OSError: libfoo.so is missing",
        "Reinstall or uninstall made-bad",
    ),
    "another version of the API": ({"api": 9}, True, "speaks backend API 9", "Upgrade the older side, ringattn-core"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("alone", [True, False])
def test_a_backend_that_does_not_work_is_a_fault_with_its_remedy(name: str, alone: bool, add, capsys) -> None:
    options, broken, fact, remedy = FAULTS[name]
    add("bad", **options)
    if not alone:
        add("good")
    status, out = said(capsys)
    assert status == int(alone or broken)
    assert ("works, and is the default" in out) == (not alone), "the other backend works"
    assert next(x["broken"] for x in doctor.diagnose().backends if x["name"] == "bad") == broken
    fault = next(fault for fault in doctor.diagnose().faults if fact in fault)
    assert remedy in fault and "\n" not in fault
    line = " ".join(out[out.index("backends\n") : out.index("faults\n")].split())
    assert fact.removeprefix("backend 'bad' cannot run here: ") in line, "the table has the same reason"


def test_a_broken_backend_for_another_platform_is_a_fault_and_its_kernel_is_not_loaded(add, capsys) -> None:
    add("good")
    add("far", platforms=("tpu",), kernel="NOBODY")
    assert said(capsys)[0] == 0 and "far_block" not in sys.modules
    add("bad", platforms=("tpu",), probe="bad_block:crash")
    assert said(capsys)[0] == 1
    (fault,) = doctor.diagnose().faults
    assert "its probe bad_block:crash failed" in fault


def test_without_any_backend_it_says_how_to_get_one(add, capsys) -> None:
    status, out = said(capsys)
    assert status == 1 and "pip install ./packages/ringattn-xla" in " ".join(out.split())


def test_a_backend_that_the_environment_names_and_nobody_has_is_a_fault(add, capsys, monkeypatch) -> None:
    add("good")
    monkeypatch.setenv("RINGATTN_BACKEND", "goof")
    status, _ = said(capsys)
    (fault,) = doctor.diagnose().faults
    assert status == 0 and "did you mean 'good'" in fault and "The backend was named by RINGATTN_BACKEND." in fault


def test_without_a_device_nothing_works_and_it_says_so(add, capsys, monkeypatch) -> None:
    def no_devices() -> list[Any]:
        raise RuntimeError("Unable to initialize backend 'cuda':\n  no driver.")

    add("good")
    monkeypatch.setattr(jax, "devices", no_devices)
    status, out = said(capsys)
    assert status == 1 and "has no device to run on" in out
    (fault,) = doctor.diagnose().faults
    assert fault == (
        "JAX finds no device: Unable to initialize backend 'cuda': no driver. "
        "Unset JAX_PLATFORMS, or install the JAX of your device"
    )


def test_a_plugin_of_jax_whose_device_is_not_found_is_a_fault(add, monkeypatch) -> None:
    add("good")
    monkeypatch.setattr(doctor, "_plugins", lambda: ["jax-cuda13-plugin"])
    assert doctor.diagnose().faults == (), "JAX_PLATFORMS says that cpu is meant"
    monkeypatch.delenv("JAX_PLATFORMS")
    (fault,) = doctor.diagnose().faults
    assert fault.startswith(
        "jax-cuda13-plugin is installed, but JAX runs on cpu. Check that the driver sees the device"
    )
