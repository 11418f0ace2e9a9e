# SPDX-License-Identifier: Apache-2.0
"""Promises of `ringattn explain`: its sends, tiles and bytes are those of the compiled program and its blocks."""

import re
from collections import Counter
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Block, Gradients, Partial
from ringattn_core.contract.tiles import tiles
from ringattn_core.placement.layout import Shards
from ringattn_tools import analysis, memory
from ringattn_tools.abstract_call import AbstractCall
from ringattn_tools.analysis import CallAnalysis
from ringattn_tools.main import parsed

SIZES = {"f32": 4, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4, "u8": 1, "pred": 1}
MOVED = re.compile(r"= ([^=]*?) (collective-permute|all-gather)(-start)?\(")
PAIR = re.compile(r" collective-permute(?:-start)?\(.*source_target_pairs=\{\{(\d+),(\d+)\}")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def asked(words: str = "", tokens: int = 64, ring: int = 4, kv: str = "") -> AbstractCall:
    shapes = f"--query 2,{tokens},4,8 --kv {kv or f'{tokens},2'} --ring {ring}"
    dtype = "" if "--dtype" in words else "--dtype f32"
    return AbstractCall.of(parsed(f"explain {shapes} {dtype} {words}".split()))


REQUESTS = {
    "causal": asked("--causal"),
    "causal zigzag": asked("--causal --layout zigzag"),
    "causal striped": asked("--causal --layout striped", kv="64,2,5"),
    "bfloat16": asked("--dtype bf16"),
    "far hops by window": asked("--window 5"),
    "three hops by window": asked("--window 17,0 --causal", ring=8),
    "no hop by chunk": asked("--chunk 16"),
    "many queries": asked("--causal --window 20,0", 128, kv="64,2"),
    "an offset": asked("--causal --query-offset 32 --layout zigzag", 32, kv="64,2"),
    "documents": asked("--documents 30,20,9 --causal --layout zigzag"),
    "documents whose positions restart": asked("--documents 30,20,9 --causal --restart-positions"),
    "prefix": asked("--prefix 20"),
    "padded": asked("--causal", 61),
    "everything else": asked("--causal --sinks 2 --alibi --bias 1,4,1,64 --dropout 0.5 --lse"),
    "ring of eight": asked("--causal", ring=8),
    "two levels": asked("--causal --layout zigzag --inner 4", ring=8),
    "alone": asked("--causal", ring=1),
}
PLANS = (
    "causal zigzag", "causal striped", "bfloat16", "three hops by window", "many queries",
    "documents whose positions restart", "everything else", "two levels",
)  # fmt: skip
"""The requests whose programs differ in their sends."""


def explained(name: str, **options: Any) -> CallAnalysis:
    return analysis.analyse(REQUESTS[name], "cpu", "xla", **options)


def moved(program: str, operation: str, of: Collection[str] = SIZES.keys()) -> Counter[int]:
    """The sizes in bytes of the arrays that one device receives by an operation, with the number of each size.

    The result of a `-start` operation lists the arrays that it sends, then the arrays that it receives.
    """
    found: Counter[int] = Counter()
    for result, named, start in MOVED.findall(program):
        shapes = [(kind, dims.split(",")) for kind, dims in ARRAY.findall(result) if kind in of]
        arrays = [SIZES[kind] * int(np.prod([int(n or 1) for n in dims])) for kind, dims in shapes]
        if named == operation:
            found.update(arrays[len(arrays) // 2 :] if start else arrays)
    return found


def program(request: AbstractCall, gradients: bool, backend: str = "xla") -> str:
    return memory.program(request, backend, 1 + gradients).as_text() or ""


def messages(found: CallAnalysis, phase: str = "") -> Counter[int]:
    """The sizes of the messages of a pass, or of both, with the number of each size."""
    rows = [row for row in found.sent if row["pass"].startswith(phase)]
    return sum((Counter({row["bytes"]: row["times"]}) for row in rows), Counter())


@pytest.mark.parametrize("name", PLANS)
def test_the_compiled_program_sends_the_messages_of_the_analysis(name: str) -> None:
    found = explained(name)
    text = program(REQUESTS[name], gradients=True)
    assert moved(text, "collective-permute") == messages(found)
    hops, pairs = found.work.hops, [(int(origin), int(target)) for origin, target in PAIR.findall(text)]
    sent = [message for step in (*hops.forward, *hops.backward) for message in step.messages]
    if len(hops.sizes) == 1:
        wanted = Counter(message.shift % hops.ranks for message in sent)
        assert Counter((target - origin) % hops.ranks for origin, target in pairs) == wanted
    groups = ({rank // hops.sizes[0] for rank in pair} for pair in pairs)
    assert sum(len(group) == 2 for group in groups) == sum(message.level > 0 for message in sent)
    assert messages(found, "forward").total() == len(found.keys_of) - 1


@pytest.mark.parametrize("name", ["causal", "padded"])
def test_without_gradients_it_sends_the_forward_messages(name: str) -> None:
    wanted = messages(explained(name), "forward")
    assert moved(program(REQUESTS[name], gradients=False), "collective-permute") == wanted
    assert wanted


@pytest.mark.parametrize("name", ["documents whose positions restart", "padded", "causal"])
def test_the_compiled_program_gathers_the_bytes_of_the_analysis(name: str) -> None:
    request, found = REQUESTS[name], explained(name)
    whole = moved(program(request, gradients=False), "all-gather", of={"s32"})
    # An all-gather returns all shards; the rank already has one of them.
    assert sum(size * count for size, count in whole.items()) * (request.ring - 1) == found.gathered * request.ring
    assert bool(found.gathered) == ("documents" in name or name == "padded")


class Recorder:
    """A kernel that computes nothing, and records which tiles of its blocks are visible."""

    def __init__(self, sizes: tuple[int, int]):
        self.sizes = sizes
        self.noted: list[tuple[int, int, np.ndarray]] = []

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        lengths = (-(-n // size) * size for n, size in zip((block.q_length, block.kv_length), self.sizes, strict=True))
        some, full = (x[:, 0] for x in tiles(block.padded_to(*lengths), *self.sizes).of_all_heads)
        jax.debug.callback(
            self._note, block.q_index[0, 0], block.kv_index[0, 0], some.astype(jnp.uint8) + full.astype(jnp.uint8)
        )
        return empty(block) if partial is None or partial.out is None else partial

    def backward(self, block: Block, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
        raise AssertionError("nobody asks for gradients")

    def _note(self, row: Any, column: Any, states: Any) -> None:
        self.noted.append((int(row), int(column), np.asarray(states)))


@pytest.mark.parametrize("name", REQUESTS)
def test_the_tiles_are_those_of_the_blocks_that_a_kernel_is_given(name: str) -> None:
    request, sizes = REQUESTS[name], (4, 8)
    found = explained(name, tile=sizes)
    recorder = Recorder(found.tile)
    features = frozenset(Feature)
    backend = Backend("recorder", 1, ("cpu",), features, kernel="nowhere:KERNEL")
    mesh = request.mesh_of(jax.devices())
    floating = {name: jnp.ones(x.shape, x.dtype) for name, x in request.floating.items()}
    with discovery.registered(backend, recorder):
        jax.block_until_ready(jax.jit(lambda x: request.attend(x, mesh, "recorder"))(floating))
        jax.effects_barrier()
    q_length, kv_length = found.lengths
    layout = request.options["layout"]
    tokens = [Shards(layout, request.ring).order(request.ring * n).tolist() for n in (q_length, kv_length)]
    got: dict[tuple[int, int], list[np.ndarray]] = {}
    for row, column, states in recorder.noted:
        got.setdefault((tokens[0].index(row) // q_length, tokens[1].index(column) // kv_length), []).append(states)
    expected = set()
    for rank in range(request.ring):
        for number in range(len(found.keys_of)):
            place = rank, int(found.work.hops.sources[number, rank])
            expected.add(place)
            for row in np.concatenate(got[place]):
                states = found.states[rank, number]
                if row.shape != states.shape:  # only the rows that are seen came, and their tiles begin elsewhere
                    row, states = ((x > 0).any(-1) for x in (row, states))
                np.testing.assert_array_equal(row, states, f"rank {rank}, hop {number}")
            assert found.tiles[number, rank] == (found.states[rank, number] > 0).sum()
    assert got.keys() == expected, "blocks that nobody told of"
    assert all(len(blocks) == 1 for blocks in got.values())


def test_the_memory_listed_is_most_of_what_xla_plans() -> None:
    request = AbstractCall.of(
        parsed(["explain", "--query", "1,8192,8,64", "--ring", "4", "--dtype", "bfloat16", "--causal"])
    )
    found = analysis.analyse(request, "cpu", "xla", compiled=True)
    assert found.compiled and found.compiled["devices"] == "4 x cpu"
    for phase, planned in (("forward", found.compiled["forward"]), ("backward", found.compiled["both"])):
        listed = {row["arrays"]: row["bytes"] for row in found.memory if row["pass"] == phase}
        named = listed.pop(memory.TOGETHER)
        assert sum(listed.values()) == named
        # On CPU a send ends before the kernel begins, and the gradients of the hop take the place of those that left.
        named -= listed.get("dk, dv of the hop, float32", 0)
        assert 0.7 * planned <= named <= 1.15 * planned, f"{phase}: {named} is named and XLA plans {planned}"


@pytest.mark.parametrize("name", ["everything else", "bfloat16"])
def test_the_inputs_and_the_output_are_those_of_one_device(name: str) -> None:
    request, found = REQUESTS[name], explained(name)
    compiled = memory.program(request, "xla", 1).memory_analysis()
    assert compiled is not None
    held = {row["arrays"].split()[0]: row["bytes"] for row in found.memory if row["pass"] == "call"}
    assert held["inputs"] == compiled.argument_size_in_bytes
    # With several results, XLA adds the size of a pointer to each.
    assert 0 <= compiled.output_size_in_bytes - held["output"] <= 64


def test_explaining_a_large_call_allocates_nothing_large() -> None:
    tokens = 2**20
    request = AbstractCall.of(parsed(f"explain --query 8,{tokens},128,256 --ring 16 --causal".split()))
    found = analysis.analyse(request, "tpu", "xla")
    assert found.memory[0]["bytes"] == 3 * 8 * tokens * 128 * 256 * 2 // 16
    assert found.tile == (512, 512), "the default tile grows with the sequence"
    assert found.tiles[:, 15].all()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_after_an_exchange_of_heads_the_groups_send_what_is_reckoned(layout: str) -> None:
    request = asked(f"--causal --window 20,0 --layout {layout} --inner 2 --strategy ulysses", ring=8)
    hops = analysis.analyse(request, "cpu", "xla").work.over_heads(2).hops
    sent = Counter(message.bytes for step in (*hops.forward, *hops.backward) for message in step.messages)
    assert moved(program(request, gradients=True), "collective-permute") == sent
