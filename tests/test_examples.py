# SPDX-License-Identifier: Apache-2.0
"""Whether the examples compute over a ring what they compute on one device, and would say so if they did not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LIBRARIES = ("jax_nn", "linen", "nnx", "equinox")
ARCHITECTURES = sorted(path.stem for path in EXAMPLES.glob("cookbook/*.py") if path.stem != "one_device")

# XLA's optimiser takes most of the time of an example; sessions of nox pass more flags against it.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {"XLA_FLAGS": UNOPTIMISED} | os.environ
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=EXAMPLES, env=environment, check=False
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_it_trains_on_the_mesh_to_the_losses_of_one_device(library: str):
    result = run(f"train_{library}.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on a 2 x 4 mesh, and equals that of one device" in result.stdout.splitlines()[-1]


def test_decoding_gives_what_one_pass_over_the_sequence_gives():
    result = run("decode.py", "--room", "128", "--chunk", "32", "--steps", "3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" as in one pass") == 3


def test_losses_that_differ_or_do_not_fall_end_with_status_1():
    code = """
import training
print(training.judge("it", [4.0, 1.0], [4.0, 1.0]))
for one, spread in (([4.0, 1.0], [4.0, 1.0002]), ([4.0, 1.0], [4.0, float("nan")]), ([4.0, 1.4], [4.0, 1.4])):
    try:
        training.judge("it", one, spread)
    except SystemExit as end:
        print(end.code)
"""
    said = run("-c", code).stdout
    assert "the loss falls from 4.0000 to 1.0000" in said
    for why in ("differ from those of one device by 2.0e-04", "one device by nan", "1.4000, not below 1.3863"):
        assert why in said


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_recipe_of_the_cookbook_gives_the_results_of_one_device(architecture: str):
    result = run(f"cookbook/{architecture}.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "gradients equal those of one device" in result.stdout


def test_a_recipe_with_another_mask_on_the_mesh_ends_with_status_1():
    code = """
import sys
sys.path.insert(0, "cookbook")
import llama, one_device
true = llama.ring_attention
llama.ring_attention = lambda *x, causal, **ring: true(*x, causal=not ring, **ring)
one_device.compare(llama.layer, llama.SHAPES, {"sp": 2}, layout="contiguous")
"""
    result = run("-c", code)
    assert result.returncode == 1
    assert "differ from those of one device by" in result.stderr
