# SPDX-License-Identifier: Apache-2.0
"""Promises of `ringattn doctor`: it names each fault and its remedy, and exits with 1 if something is broken."""

import sys
from typing import Any

import jax
import pytest
from ringattn_tools import doctor
from ringattn_tools.main import main


def test_where_all_is_well_it_says_what_is_there_and_which_backend_answers(add, capsys, monkeypatch) -> None:
    add("good")
    add("better", priority=3)
    add("elsewhere", platforms=("tpu",))
    monkeypatch.setenv("RINGATTN_AUTOTUNE", "off")
    assert main(["doctor"]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    states = ("better works, and is the default", "good works", "elsewhere is not for cpu")
    assert lines.issuperset(("no faults", f"jax {jax.__version__}", "cpu 8 x cpu", "RINGATTN_AUTOTUNE off", *states))


FAULTS: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "a probe that refuses": ({"probe": "bad_block:unsound"}, False, "no such device in the house", "another one"),
    "a probe that raises": ({"probe": "bad_block:crash"}, True, "OSError: libfoo.so is missing", "Reinstall or"),
    "another version of the API": ({"api": 9}, True, "speaks backend API 9", "Upgrade the older side"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_backend_that_does_not_work_is_a_fault_with_its_remedy(name: str, add) -> None:
    options, broken, fact, remedy = FAULTS[name]
    add("bad", **options)
    assert main(["doctor"]) == 1
    add("good")
    assert main(["doctor"]) == int(broken)
    found = doctor.diagnose()
    assert found.working == (found.default,) == ("good",)
    (fault,) = found.faults
    assert fact in fault and remedy in fault and "\n" not in fault


def test_a_broken_backend_for_another_platform_is_a_fault_and_its_kernel_is_not_loaded(add) -> None:
    add("good")
    add("far", platforms=("tpu",), kernel="NOBODY")
    assert main(["doctor"]) == 0 and "far_block" not in sys.modules
    add("bad", platforms=("tpu",), probe="bad_block:crash")
    assert main(["doctor"]) == 1
    (fault,) = doctor.diagnose().faults
    assert "its probe bad_block:crash failed" in fault


def test_without_any_backend_it_says_how_to_get_one(add, capsys) -> None:
    assert main(["doctor"]) == 1
    assert "pip install ./packages/ringattn-xla" in " ".join(capsys.readouterr().out.split())


def test_a_backend_that_the_environment_names_and_nobody_has_is_a_fault(add, monkeypatch) -> None:
    add("good")
    monkeypatch.setenv("RINGATTN_BACKEND", "goof")
    (fault,) = doctor.diagnose().faults
    assert "did you mean 'good'" in fault


def test_without_a_device_nothing_works_and_it_says_so(add, monkeypatch) -> None:
    def no_devices() -> list[Any]:
        raise RuntimeError("Unable to initialize backend 'cuda':\n  no driver.")

    add("good")
    monkeypatch.setattr(jax, "devices", no_devices)
    assert main(["doctor"]) == 1
    (fault,) = doctor.diagnose().faults
    assert "'cuda': no driver" in fault


def test_a_plugin_of_jax_whose_device_is_not_found_is_a_fault(add, monkeypatch) -> None:
    add("good")
    monkeypatch.setattr(doctor, "_plugins", lambda: ["jax-cuda13-plugin"])
    assert doctor.diagnose().faults == (), "JAX_PLATFORMS says that cpu is meant"
    monkeypatch.delenv("JAX_PLATFORMS")
    (fault,) = doctor.diagnose().faults
    assert fault.startswith("jax-cuda13-plugin is installed, but JAX runs on cpu")
