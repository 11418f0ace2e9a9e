# SPDX-License-Identifier: Apache-2.0
"""On every supported architecture the kernels compile, fit, and spill no more than is written down."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.config import FwdParams
from ringattn_core.contract.protocol import Partial
from ringattn_core.contract.tiles import Tiles
from ringattn_core.masks import Local
from ringattn_testing.exhaustive import in_tests
from ringattn_testing.triton.compile_budgets import CUDA, ROCM, SHARED, allowed
from ringattn_testing.triton.compile_reports import Report, for_amd, launches, of_lowered
from ringattn_testing.triton.given_blocks import SEEDS, SLOPES, bias, dense_mask, half_bias, ids, make_block, ranges
from ringattn_triton import block_kernel
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.hopper import forward
from ringattn_triton.launch import compiling_for
from ringattn_triton.launch.target import Target
from ringattn_triton.visited_tiles import of_bitmap

LENGTH = 1024
HEADS = 4
CASES = ((jnp.bfloat16, 64), (jnp.bfloat16, 128), (jnp.float32, 64))
BACKWARD = {"ringattn_backward_keys", "ringattn_backward_queries"}
TABLE = "ringattn_table"
KERNELS = {"ringattn_forward", TABLE} | BACKWARD
MATRIX_UNITS = {90: "wgmma", 100: "tcgen05", "gfx942": "mfma"}
FOR_ALL = {(*CASES[1], target) for target in (80, *MATRIX_UNITS)} | {(*CASES[2], 80)}
"""Each generation of matrix units once, and float32, which does not use them."""
HOPPER = "ringattn_hopper_forward"


def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def block(dtype, head_dim, length=LENGTH, **fields):
    """A block of one batch row whose query heads share key heads by twos."""
    given = {"heads": HEADS, "kv_heads": HEADS // 2, "dim": head_dim, "dtype": dtype}
    return make_block(1, length, length, **(given | fields))


def alone(block):
    """The block as a ring of one has it: K and V where they are, and final results."""
    return dataclasses.replace(block, kv=(block.k, block.v), final=True)


def everything(dtype, head_dim):
    """A block of a ragged length whose scores depend on all that they can depend on."""
    length = LENGTH - 24
    rule = {"causal": True, "sliding_window": (300, 20), "logits_soft_cap": 30.0}
    rule |= {"masks": (Local(100, 100),), "mask_of_head": (0,) * HEADS, "dropout_prob": 0.1, "seed": SEEDS[:1]}
    segments = dict.fromkeys(("q_segments", "kv_segments"), ids(1, length))
    scores = {"bias": half_bias(1, HEADS, length, length), "slopes": SLOPES, "mask": dense_mask(1, 1, length, length)}
    return block(dtype, head_dim, length, **rule, **segments, **scores)


def traced(block):
    """The forward and backward program of a block, traced anew; it continues what there is unless it is final."""
    batch, length, heads, _ = block.q.shape
    out = shape(batch, length, heads, block.value_dim, dtype=jnp.float32)
    lse = shape(batch, heads, length, dtype=jnp.float32)
    dq = shape(*block.q.shape, dtype=jnp.float32)
    dout = shape(*out.shape, dtype=block.q.dtype)
    partial, dq = (None, None) if block.final else (Partial(out, lse), dq)

    def both(block, partial, dout, lse, delta, dq):
        return KERNEL.forward(block, partial), KERNEL.backward(block, dout, lse, delta, dq)

    return jax.jit(both).trace(block, partial, dout, lse, lse, dq)


def gradients(block):
    """The backward program of a final block with values of the size of keys, traced anew."""
    batch, length, heads, _ = block.q.shape
    of_rows = shape(batch, heads, length, dtype=jnp.float32)
    return jax.jit(lambda *given: KERNEL.backward(*given, None)).trace(block, block.q, of_rows, of_rows)


def from_sinks(block):
    """The forward program of a block that begins from sinks, traced anew."""
    batch, length, heads, _ = block.q.shape
    lse = shape(batch, heads, length, dtype=jnp.float32)
    sinks = Partial(None, lse, lse if block.rule.return_max_logits else None)
    return jax.jit(lambda block, sinks: KERNEL.forward(block, sinks)).trace(block, sinks)


def reports(block, target, monkeypatch, trace=traced) -> list[Report]:
    if target in ROCM:
        monkeypatch.setattr(block_kernel, "target", lambda: Target("rocm"))
        return of_traced(trace(block), target)
    with compiling_for(target):
        return of_traced(trace(block), target)


def of_traced(program, target) -> list[Report]:
    """On every launch of a program that nobody has lowered yet: JAX would remember for what target."""
    if target in ROCM:
        return [for_amd(call, operands, target) for call, operands in launches(program.jaxpr.jaxpr)]
    with compiling_for(target):
        return of_lowered(program.lower(lowering_platforms=("cuda",)))


def runs(report, target):
    """Whether a device can launch the kernel as it is."""
    assert report.threads == report.warps * (32 if isinstance(target, int) else 64), report
    assert report.shared <= SHARED[target] * 1024, report


@pytest.mark.parametrize(
    ("dtype", "head_dim", "target"),
    in_tests(lambda *case: case in FOR_ALL, [(*case, target) for case in CASES for target in (*CUDA, *ROCM)]),
)
def test_every_kernel_fits_its_target_spills_little_and_uses_the_matrix_units(dtype, head_dim, target, monkeypatch):
    found = reports(alone(block(dtype, head_dim, causal=True)), target, monkeypatch)
    special = {HOPPER, TABLE} | BACKWARD
    expected = special if (dtype, head_dim, target) == (*CASES[1], 90) else KERNELS
    assert {report.name for report in found} == expected
    for report in found:
        runs(report, target)
        bound, reason = allowed(dtype.__name__, head_dim, report.name, target)
        assert report.spilled <= bound, f"{report}; the budget is {bound}: {reason}"
        if dtype == jnp.bfloat16:
            assert report.matrix == ("" if report.name == TABLE else MATRIX_UNITS.get(target, "mma")), report


@pytest.mark.parametrize("max_logits", [False, True])
@pytest.mark.parametrize("target", (90, "gfx942"))
def test_the_kernel_for_any_gpu_begins_from_sinks_and_spills_nothing(target, max_logits, monkeypatch):
    window = block(jnp.bfloat16, 64, causal=True, sliding_window=(127, 0), return_max_logits=max_logits)
    (report,) = (x for x in reports(alone(window), target, monkeypatch, from_sinks) if x.name != TABLE)
    runs(report, target)
    assert report.name == "ringattn_forward" and report.spilled == 0, report


def for_hopper(block, fresh, monkeypatch):
    """A report on the kernel for Hopper: on a ring of one if `fresh`, else where it continues a partial result.

    If `fresh` is "sinks", the ring of one has sinks.
    """
    monkeypatch.setattr(forward, "_too_little", lambda *_: False)
    jax.clear_caches()  # what another test traced has another kernel
    batch, length, heads, dim = block.q.shape
    lse = shape(batch, heads, length, dtype=jnp.float32)
    out = shape(batch, length, heads, dim, dtype=jnp.float32)
    partial = Partial(None if fresh else out, lse, lse if block.rule.return_max_logits else None)
    partial = None if fresh is True else partial
    with compiling_for(90):
        program = jax.jit(KERNEL.forward).trace(alone(block) if fresh else block, partial)
        found = of_lowered(program.lower(lowering_platforms=("cuda",)))
    assert {report.name for report in found} == {HOPPER, TABLE}, found
    (report,) = (report for report in found if report.name == HOPPER)
    assert report.matrix == "wgmma" and not report.serialized, report
    runs(report, 90)
    return report


RAGGED = {"length": LENGTH - 24, "causal": True, "sliding_window": (300, 0)}
BY_HEAD = {"kv_range": ranges(1, HEADS, LENGTH - 24)}
BY_HEAD |= dict.fromkeys(("q_segments", "kv_segments"), ids(1, LENGTH - 24))
DROPPED, SLOPED = ({"causal": True, "dropout_prob": 0.1, "seed": SEEDS[:1]}, {"causal": True, "slopes": SLOPES})
CAPPED = {"logits_soft_cap": 30.0}
OF_HOPPER = [
    # What the kernel has beside masks, the size of heads, the block, and whether it continues no partial output.
    ("", 128, {}, True),
    ("", 128, {"causal": True}, False),
    # A kernel with masks has the loop of a kernel without masks, and one more.
    *(("", dim, RAGGED, False) for dim in (64, 128, 192, 256)),
    *(("", dim, RAGGED | BY_HEAD, False) for dim in (64, 128, 192, 256)),
    (" with a soft cap", 128, RAGGED | CAPPED, False),
    (" with a bias", 128, {"causal": True, "bias": half_bias(1, 1, LENGTH, LENGTH)}, True),
    (" with a bias", 128, {"length": LENGTH - 24, "causal": True, "bias": half_bias(1, 1, *[LENGTH - 24] * 2)}, False),
    *((" with dropout", dim, DROPPED, True) for dim in (128, 192, 256)),
    *((" with slopes", dim, SLOPED, True) for dim in (64, 128, 192, 256)),
    (" with slopes and a soft cap", 128, SLOPED | CAPPED, True),
    ("", 128, {"causal": True, "return_max_logits": True}, False),
    *(("", dim, RAGGED, "sinks") for dim in (64, 128)),
    (" with a soft cap", 128, RAGGED | CAPPED, "sinks"),
]


@pytest.mark.parametrize(
    ("beside", "head_dim", "fields", "fresh"),
    # On a ring of one, heads of 128 with every option; with the most masks, also the largest heads.
    in_tests(
        lambda _, dim, fields, fresh: dim in (128, 256) if "kv_range" in fields else dim == 128 and fresh is True,
        OF_HOPPER,
    ),
)
def test_the_kernel_for_hopper_spills_no_more_than_its_budget(beside, head_dim, fields, fresh, monkeypatch):
    report = for_hopper(block(jnp.bfloat16, head_dim, **fields), fresh, monkeypatch)
    bound, reason = allowed("bfloat16", head_dim, f"{HOPPER}{beside}", 90)
    assert report.spilled <= bound, f"{report}; the budget is {bound}: {reason}"


@pytest.mark.parametrize(
    ("dtype", "precision", "fields", "target", "trace"),
    in_tests(
        lambda *case: case[-1] == from_sinks,
        [
            (jnp.float32, "default", {"bias": bias(1, 1, LENGTH, LENGTH), **DROPPED}, 90, from_sinks),
            (jnp.float32, None, {}, 86, from_sinks),
            (jnp.bfloat16, None, {"bias": half_bias(1, 1, LENGTH, LENGTH), **DROPPED}, 100, traced),
        ],
    ),
)
def test_kernels_with_large_tiles_of_scores_fit_into_shared_memory(
    dtype, precision, fields, target, trace, monkeypatch
):
    for report in reports(alone(block(dtype, 128, precision=precision, **fields)), target, monkeypatch, trace):
        runs(report, target)


@pytest.mark.parametrize(("dtype", "dim", "target"), [(jnp.bfloat16, 128, 90), (jnp.bfloat16, 64, 80)])
@pytest.mark.parametrize("fused", [False, True])
def test_another_width_of_a_window_compiles_no_other_kernel(dtype, dim, target, fused):
    """A width is in the arrays that kernels read. It may change a plan, but these two do not."""
    calls = []
    for window in (300, 301):
        given = block(dtype, dim, causal=True, sliding_window=(window, 0), fused_backward=fused)
        with compiling_for(target):
            calls.append([call for call, _ in launches(traced(alone(given)).jaxpr.jaxpr)])
    assert calls[0] == calls[1] and len(calls[0]) >= 4
    assert ("ringattn_hopper_backward" in {call.name for call in calls[0]}) == (fused and target == 90)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_documents_as_ranges_have_the_plans_of_documents_as_segment_ids(dim, fused):
    """The sizes of tiles, the order of turns, and how many run side by side."""
    document = (np.arange(LENGTH, dtype=np.int32) // 300)[None]
    as_ids = dict.fromkeys(("q_segments", "kv_segments"), document)
    as_range = {"kv_range": (document[:, None] * 300, np.full((1, 1, LENGTH), LENGTH, np.int32))}
    plans = []
    for given in (as_ids, as_range):
        given = alone(block(jnp.bfloat16, dim, causal=True, fused_backward=fused, **given))
        with compiling_for(90):
            calls = [call for call, _ in launches(traced(given).jaxpr.jaxpr)]
        plans.append([(call.name, call.grid, call.warps, call.stages) for call in calls])
        for call in calls:  # the arrays that a kernel reads are in `F`, and in `query_kinds` of a plan
            for name, value in call.constants:
                value = dataclasses.replace(value, query_kinds=()) if hasattr(value, "query_kinds") else value
                plans[-1] += [] if name == "F" else [(name, value)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_the_kernel_for_hopper_fits_with_every_mask_at_once(soft_cap, monkeypatch):
    length = LENGTH - 24
    given = {"causal": True, "chunk_size": 300, "logits_soft_cap": soft_cap, "padded": True}
    given |= {"masks": (Local(100, 100), Local(100, 50)), "mask_of_head": (0, 1) * (HEADS // 2)}
    given |= dict.fromkeys(("q_segments", "kv_segments"), ids(1, length))
    given |= {"mask": dense_mask(1, HEADS, length, length)}
    if soft_cap is None:
        given["bias"] = bias(1, HEADS, length, length).astype(jnp.float16)
    report = for_hopper(block(jnp.float16, 128, length, **given), True, monkeypatch)
    assert report.spilled <= 1536, report


@pytest.mark.parametrize("target", in_tests(lambda target: target != 90, [(target,) for target in (80, 90, *ROCM)]))
def test_kernels_with_every_feature_at_once_compile_and_fit(target, monkeypatch):
    found = reports(everything(jnp.bfloat16, 40), target, monkeypatch)
    assert len(found) > len(KERNELS)
    for report in found:
        runs(report, target)


@pytest.mark.parametrize("as_ranges", [False, True])
@pytest.mark.parametrize(("kv_heads", "most"), [(HEADS, 8), (HEADS // 2, 128)])
def test_two_programs_for_the_gradients_of_documents_fit_on_hopper_and_keep_products_in_flight(
    kv_heads, most, as_ranges, monkeypatch
):
    """Where heads share keys the kernel of dk and dv spills something around its loops over tiles, not in them."""
    of_tokens = {"kv_range": ranges(1, 1, LENGTH)}
    if not as_ranges:
        of_tokens = dict.fromkeys(("q_segments", "kv_segments"), ids(1, LENGTH))
    documents = block(jnp.bfloat16, 128, kv_heads=kv_heads, causal=True, **of_tokens)
    found = reports(alone(documents), 90, monkeypatch, gradients)
    held = [report for report in found if report.name in BACKWARD]
    assert len(held) == 2
    for report in held:
        assert report.warps == 4 and report.matrix == "wgmma" and not report.serialized, report
        assert 2 * report.shared <= SHARED[90] * 1024 and report.spilled <= most, report


@pytest.mark.parametrize(
    ("listed", "run", "by_keys", "target"),
    [
        *((False, True, by_keys, 80) for by_keys in (False, True)),
        *((True, run, by_keys, 80) for run in (False, True) for by_keys in (False, True)),
        *((True, True, by_keys, target) for by_keys in (False, True) for target in ROCM),
    ],
)
def test_tables_of_any_size_compile_and_spill_nothing(listed, run, by_keys, target):
    for sizes in ((2, 3, 5), (3, 16384, 16300)):

        def made(some, full):
            *arrays, _ = of_bitmap(
                Tiles(some[:, None], full[:, None]), listed, run, by_keys, by_keys, ranked=by_keys, counters=5000
            )
            return arrays

        found = of_traced(jax.jit(made).trace(*[shape(*sizes, dtype=jnp.bool_)] * 2), target)
        assert [report.name for report in found] == [TABLE]
        runs(found[0], target)
        assert found[0].spilled == 0, found[0]


def test_a_budget_that_is_broken_is_seen():
    """A tile far too large for its warps spills, and the report says so."""
    params = FwdParams(q_blocksize=128, kv_blocksize=128, num_warps=4)
    given = block(jnp.bfloat16, 128, causal=True, fwd_params=params)
    with compiling_for(90):
        found = of_lowered(traced(given).lower(lowering_platforms=("cuda",)))
    (forward,) = [report for report in found if report.name == "ringattn_forward"]
    assert forward.spilled > 0 and forward.warps == 4, forward


if __name__ == "__main__":  # what the budgets are written from
    with pytest.MonkeyPatch.context() as patch:
        for case in CASES:
            for device in (*CUDA, *ROCM):
                for line in reports(block(*case, causal=True), device, patch):
                    print(case[0].__name__, case[1], line, flush=True)
                patch.undo()
