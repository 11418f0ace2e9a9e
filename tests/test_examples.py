# SPDX-License-Identifier: Apache-2.0
"""Whether the examples compute over a ring what they compute on one device, and would say so if they did not."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LIBRARIES = ("jax_nn", "linen", "nnx", "equinox")
ARCHITECTURES = sorted(path.stem for path in EXAMPLES.glob("cookbook/*.py") if path.stem not in ("dense", "one_device"))

# XLA's optimiser takes most of the time of an example; sessions of nox pass more flags against it.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# The bytes of a token that travel at each hop of a ring: in a forward pass, and in a forward and a backward pass, in
# which keys travel once more, and their gradients.
LATENT = 4 * (12 + 8)  # the latent and the rotated key; keys and values have 4 * 8 * (24 + 16)
PROJECTED = 4 * 2 * 32  # keys, which are the values too; positions have 4 more
KEYS, INDEX_KEY = 4 * 4 * (16 + 16), 4 * 16
SENT = {
    "deepseek": (LATENT, 3 * LATENT),
    "gemma4": (PROJECTED + 4, 2 * (PROJECTED + 4) + PROJECTED),
    "eight_bits": (2 * 4 * (16 + 4), 2 * 2 * 4 * (16 + 4) + 2 * 4 * 4),  # of one byte, and scales of four
    # Attention and two rounds of `teach` take the latent; the choice and both rounds take the key of the indexer.
    "deepseek_sparse": (2 * LATENT + 2 * INDEX_KEY, 5 * LATENT + 4 * INDEX_KEY),
    "minimax_blocks": (KEYS + INDEX_KEY, 3 * KEYS + INDEX_KEY),  # a choice has no backward pass
    "moba": (KEYS + 4 * 4 * 16 // 16, 3 * KEYS + 4 * 4 * 16 // 16),  # a mean of each block of 16 keys
    "nsa": (KEYS + KEYS // 8 + 4 * 4 * 17 // 8, 3 * (KEYS + KEYS // 8) + 4 * 4 * 17 // 8),  # blocks of 8
    "deepseek_compressed": (4 * 16 // 8, 3 * 4 * 16 // 8),  # a compressed key of 8 tokens
}
# The tails of two chunks for the window, of 23 tokens in two rows, and the positions of the compressed keys.
TAILS, POSITIONS = 2 * 2 * 23, 4 * 256 // 8
MORE = {
    "nsa": (TAILS * KEYS + POSITIONS, 3 * TAILS * KEYS + POSITIONS),
    "deepseek_compressed": (TAILS * 4 * 16 + POSITIONS, 3 * TAILS * 4 * 16 + POSITIONS),
}


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


def test_a_model_learns_with_chosen_blocks_and_writes_what_its_indexer_chooses(tmp_path: Path):
    small = ("--cpu", "4", "--length", "128", "--before", "12", "--steps", "4", "--held-out", "2")
    result = run("train_selected.py", *small, "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    losses = json.loads((tmp_path / "run.json").read_text())["losses"]
    assert abs(losses["chosen blocks"][0][0] - losses["dense"][0][0]) < 0.1
    assert max(losses["chosen blocks"][-1]) < math.log(256)
    ids = np.load(tmp_path / "choices-128.npy")
    assert ids.shape == (128, 4, 8)
    assert (ids.max(-1) == np.arange(128)[:, None] // 8).all()  # each query chooses its own block
    assert (tmp_path / "curves.png").stat().st_size


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


@pytest.mark.parametrize("architecture", SENT)
def test_a_recipe_sends_so_many_bytes_of_each_token(architecture: str):
    code = f"""
import functools, json, sys
sys.path.insert(0, "cookbook")
import {architecture} as recipe
import jax, one_device
from ringattn_testing import rings
mesh = rings.mesh_of(sp=4)
place = jax.sharding.NamedSharding(mesh, jax.P(None, "sp"))
shapes = one_device.BATCH, one_device.LENGTH, one_device.WIDTH
x, positions = jax.ShapeDtypeStruct(shapes, "float32", sharding=place), jax.numpy.arange(one_device.LENGTH)[None]
weights = {{name: jax.numpy.ones(shape) for name, shape in recipe.SHAPES.items()}}
ring = {{"mesh": mesh, "axis_name": "sp", "layout": "zigzag"}}
for compute in (recipe.layer, functools.partial(one_device.results, recipe.layer)):
    print(json.dumps(rings.sent(functools.partial(compute, **ring), weights, x, positions)))
"""
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    forward, both = map(json.loads, result.stdout.splitlines())
    hops, tokens = 3, 2 * 256 // 4
    more = MORE.get(architecture, (0, 0))
    for arrays, wanted, once in zip((forward, both), SENT[architecture], more, strict=True):
        # XLA sends a key of the indexer once where the first hops of two loops need it.
        least = hops - 1 if architecture == "deepseek_sparse" else hops
        assert least * tokens * wanted <= sum(map(size, arrays)) - once <= hops * tokens * wanted, arrays


def size(array: str) -> int:
    """The bytes of an array of this type, such as `f32[2,64]`."""
    bits, shape = re.findall(r"\d+|\[.*\]", array)
    return int(bits) // 8 * math.prod(json.loads(shape))


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
