# SPDX-License-Identifier: Apache-2.0
"""How large the tiles of the portable kernels are, and how many warps and stages they have, on each kind of device."""

import dataclasses
from typing import Any, Final

from ringattn_core import BwdParams, FwdParams
from ringattn_core.contract.protocol import Block
from ringattn_core.errors import InputError

from .. import sparsity
from ..kernel_inputs import BlockConstants, padded_dim
from ..launch.target import Target

_SMALLEST_TILE: Final = 16
_WARPGROUP_PRODUCTS: Final = (90, 100, 103)
"""Compute capabilities whose tensor cores multiply 64 rows at once and can read both operands from shared memory."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Tile sizes, warps and stages of a kernel.

    `in_registers`: a program's own tile of q or k is in registers. `sharing`: how many query heads of a key head share
    a tile of the forward kernel. A tile has a row for each query of each of these heads, `q_tile` rows in all.
    """

    q_tile: int
    kv_tile: int
    warps: int
    stages: int
    in_registers: bool = False
    sharing: int = 1


_INTERPRETED: Final = Schedule(32, 32, 4, 2)
"""The schedule of interpreted kernels: tiles are small enough for short tests to have several, and large enough for
NumPy to be efficient."""


_SHORT_WINDOW: Final = 128
"""The longest window in which heads share a tile (`_share`)."""
_SHARED: Final = 8
"""How many heads share a tile in such windows."""
_SHORT: Final = Schedule(64, 32, 4, 3)
"""The forward kernel's schedule in such windows. With 8,192 tokens, 64 query heads and 8 key heads of 64, and a window
of 128, a call takes 0.82 of its time with 64 by 64 tiles of one head: the window hides fewer pairs of a visited tile,
and four programs fit on a multiprocessor."""


_DOCUMENTS: Final = Schedule(32, 64, 4, 3, in_registers=True)
"""The schedule for dk and dv with documents. Two programs fit on a multiprocessor: one computes while the other
begins or ends."""


def forward(block: Block, constants: BlockConstants, target: Target, default: Schedule | None = None) -> Schedule:
    """The forward kernel's schedule: `default`, except for sizes that the caller fixes in `fwd_params`.

    If `default` is `None`, the default of the device.
    """
    itemsize, share = block.q.dtype.itemsize, _share(block, constants, target)
    if default is None:
        short = share and target.kind == "cuda"
        default = _SHORT if short else _forward_by_device(constants, itemsize, constants.largest_dim, target)
    schedule = _chosen(default, constants, itemsize, block.rule.fwd_params, target)
    in_registers = schedule.kv_tile <= 64 and _operand_fits_registers(constants, itemsize, target)
    return dataclasses.replace(schedule, in_registers=in_registers, sharing=_SHARED if share else 1)


def _share(block: Block, constants: BlockConstants, target: Target) -> bool:
    """Whether heads share tiles of the forward kernel, on a Hopper GPU or interpreted.

    They do in short windows, for 16-bit dtypes and heads of up to 64, if `_SHARED` divides the number of query heads of
    a key head, and no option depends on the head.
    """
    measured = target.kind == "interpreter" or target == Target("cuda", 90)
    fits = block.q.dtype.itemsize == 2 and constants.largest_dim <= 64 and constants.group % _SHARED == 0
    by_head = constants.bias or constants.by_head or constants.ranges_by_head
    return measured and fits and not by_head and block.reach.span <= _SHORT_WINDOW


def _forward_by_device(constants: BlockConstants, itemsize: int, dim: int, target: Target) -> Schedule:
    """The forward kernel's default: on Hopper the fastest that was measured, elsewhere one that spills few registers.

    Exact float32 products do not run on tensor cores: their operands are in registers, so tiles are small. Dropout
    needs a register for each score, and a bias needs one more tile of shared memory.
    """
    if target.kind == "interpreter":
        return _INTERPRETED
    if itemsize == 4:
        if constants.precision == "ieee":
            return Schedule(64 if dim <= 128 else 32, 16, 8, 2)
        if constants.precision == "tf32" and _warpgroup_products(target) and dim <= 128:
            return Schedule(128, 64, 8, 2)
        if _warpgroup_products(target) and dim <= 128:
            return Schedule(32, 64, 4, 2)
        return Schedule(64, 32, 4, 2) if dim <= 128 else Schedule(32, 16, 8, 2)
    if target.kind == "rocm":
        return Schedule(128 if dim <= 128 else 64, 64 if dim <= 64 else 32, 4, 1)
    if _warpgroup_products(target):
        if dim > 128:
            return Schedule(128, 32 if constants.dropout or constants.bias else 64, 8, 2)
        # Two programs share a multiprocessor: one multiplies while the other takes exponentials, begins or ends.
        return Schedule(64, 64, 4, 3)
    if dim > 128:
        return Schedule(64, 32, 8, 2)
    if dim > 64:
        return Schedule(128, 32 if constants.dropout else 64, 8, 2)
    return Schedule(128, 32 if constants.dropout else 64, 4, 2 if constants.bias else 3)


def backward_keys(block: Block, constants: BlockConstants, target: Target) -> Schedule:
    """The dk and dv kernel's schedule: the device's default, except for sizes that the caller fixes in `bwd_params`."""
    itemsize, params = block.q.dtype.itemsize, block.rule.bwd_params
    default = _backward_keys_by_device(constants, itemsize, constants.largest_dim, target)
    small = sparsity.scattered(block) and _keys_fit_registers(constants, itemsize, target)
    fixed = (params.q_blocksize, params.kv_blocksize, params.num_warps)
    if small and fixed == (None, None, None):
        default = _DOCUMENTS
    schedule = _chosen(default, constants, itemsize, params, target)
    tiles = (schedule.q_tile, schedule.kv_tile, schedule.warps)
    in_registers = small and tiles == (_DOCUMENTS.q_tile, _DOCUMENTS.kv_tile, _DOCUMENTS.warps)
    return dataclasses.replace(schedule, in_registers=in_registers)


def _backward_keys_by_device(constants: BlockConstants, itemsize: int, dim: int, target: Target) -> Schedule:
    """The dk and dv kernel's default schedule.

    A program holds k, v, dk and dv of its keys, so most tiles have at most as many queries as keys.
    """
    if target.kind == "interpreter":
        return _INTERPRETED
    if itemsize == 4:
        if constants.precision != "ieee" and _warpgroup_products(target) and dim <= 128:
            return Schedule(64 if dim <= 64 else 32, 32, 4, 2)
        return Schedule(16, 16 if dim > 128 else 32 if dim > 64 else 64, 8, 2)
    if _warpgroup_products(target):
        if dim > 128:
            return Schedule(32, 64, 8, 2)
        if constants.bias and (constants.dropout or constants.bias_key == 1):
            return Schedule(32, 128, 8, 2) if constants.dropout else Schedule(32, 64, 4, 3)
        return Schedule(64, 64, 4, 3) if dim <= 64 else Schedule(64, 128, 8, 3)
    return Schedule(32, 64 if dim <= 128 else 32, 4, 1 if target.kind == "rocm" else 2)


def backward_queries(block: Block, constants: BlockConstants, target: Target) -> Schedule:
    """The dq kernel's schedule: the device's default, except for sizes that the caller fixes in `bwd_params`.

    Sizes in its `extra`, such as `dq_q_blocksize`, replace the sizes that it fixes for the dk and dv kernel.
    """
    itemsize, params = block.q.dtype.itemsize, block.rule.bwd_params
    own = {name.removeprefix("dq_"): value for name, value in params.extra if name.startswith("dq_")}
    params = dataclasses.replace(params, extra=(), **own)
    default = _backward_queries_by_device(constants, itemsize, constants.largest_dim, target)
    schedule = _chosen(default, constants, itemsize, params, target)
    short = schedule.q_tile <= 64 or constants.dropout
    in_registers = short and constants.largest_dim > 64 and _operand_fits_registers(constants, itemsize, target)
    return dataclasses.replace(schedule, in_registers=in_registers)


def _backward_queries_by_device(constants: BlockConstants, itemsize: int, dim: int, target: Target) -> Schedule:
    if target.kind == "interpreter":
        return _INTERPRETED
    if itemsize == 4:
        if constants.precision != "ieee" and _warpgroup_products(target) and dim <= 128:
            return Schedule(32, 64, 4, 2)
        return Schedule(16 if dim > 128 else 32 if dim > 64 else 64, 16, 8, 2)
    if _warpgroup_products(target):
        if dim > 128:
            return Schedule(128, 32, 8, 2)
        if constants.bias or (constants.dropout and dim > 64):
            return Schedule(128, 64, 8, 3)
        if dim <= 64:
            short = constants.below or constants.segments or constants.masks
            return Schedule(128, 64, 4, 3) if constants.only_masks and not short else Schedule(64, 64, 4, 3)
        return Schedule(64, 64, 4, 3)
    return Schedule(64 if dim <= 128 else 32, 32, 4, 1 if target.kind == "rocm" else 2)


def _chosen(
    default: Schedule, constants: BlockConstants, itemsize: int, params: FwdParams | BwdParams, target: Target
) -> Schedule:
    """The `default`, cut to the block's lengths, except for sizes that the caller fixes in `params`.

    Raises if the tiles of the schedule's pipeline alone exceed shared memory. If the rest of the kernel does not fit
    beside them, `launch.compiled` compiles it with fewer stages.
    """
    owner = "fwd_params" if isinstance(params, FwdParams) else "bwd_params"
    schedule = _fixed(_shortened(default, constants), params, owner)
    vectors = itemsize * (padded_dim(constants.head_dim) + padded_dim(constants.value_dim))
    streams = schedule.kv_tile if owner == "fwd_params" else min(schedule.q_tile, schedule.kv_tile)
    # AMD's compiler keeps the last stage in registers.
    needed = vectors * streams * (schedule.stages - (target.kind == "rocm"))
    limit = target.shared_memory
    if limit is not None and needed > limit:
        raise InputError(
            owner,
            f"{schedule} needs {needed} bytes of shared memory and the device has {limit}",
            f"Ask for smaller blocks or fewer stages; the default is {default}",
        )
    return schedule


def _warpgroup_products(target: Target) -> bool:
    return target.kind == "cuda" and target.capability in _WARPGROUP_PRODUCTS


def _operand_fits_registers(constants: BlockConstants, itemsize: int, target: Target) -> bool:
    """Whether products can read a left operand from registers, and registers suffice to keep the operand there."""
    return target == Target("cuda", 90) and itemsize < 4 and constants.largest_dim <= 128


def _keys_fit_registers(constants: BlockConstants, itemsize: int, target: Target) -> bool:
    """Whether the kernel of dk and dv can keep k in registers beside documents: only with few other options."""
    light = constants.only_masks and not constants.masks
    wide = constants.largest_dim > 64
    return light and wide and _operand_fits_registers(constants, itemsize, target)


def _shortened(schedule: Schedule, constants: BlockConstants) -> Schedule:
    """Cuts tiles to the lengths of the block, as powers of two; a shorter `q_tile` gets at most 4 warps."""
    q_tile = min(schedule.q_tile, padded_dim(constants.q_length))
    kv_tile = min(schedule.kv_tile, padded_dim(constants.kv_length))
    warps = schedule.warps if q_tile == schedule.q_tile else min(schedule.warps, 4)
    return dataclasses.replace(schedule, q_tile=q_tile, kv_tile=kv_tile, warps=warps)


def _fixed(schedule: Schedule, params: FwdParams | BwdParams, owner: str) -> Schedule:
    """The `schedule`, except for sizes that the caller fixes in `params` (`owner` in errors); raises on wrong sizes."""
    asked = {
        "q_tile": ("q_blocksize", params.q_blocksize, _SMALLEST_TILE, 256),
        "kv_tile": ("kv_blocksize", params.kv_blocksize, _SMALLEST_TILE, 256),
        "warps": ("num_warps", params.num_warps, 1, 16),
        "stages": ("num_stages", params.num_stages, 1, 8),
    }
    changes: dict[str, int] = {}
    for field, (name, value, least, most) in asked.items():
        if value is None:
            continue
        power = field == "stages" or value & (value - 1) == 0
        if not (power and least <= value <= most):
            kind = "a number" if field == "stages" else "a power of two"
            raise InputError(
                f"{owner}.{name}", f"got {value}", f"The Triton kernels take {kind} from {least} to {most}"
            )
        changes[field] = value
    return dataclasses.replace(schedule, **changes)


def launch_options(constants: BlockConstants, schedule: Schedule) -> dict[str, Any]:
    """The arguments of `launch` that all portable kernels have in common: constants, warps and stages."""
    return {
        "F": constants,
        "Q_TILE": schedule.q_tile,
        "KV_TILE": schedule.kv_tile,
        "DIM": padded_dim(constants.head_dim),
        "VALUE_DIM": padded_dim(constants.value_dim),
        "IN_REGISTERS": schedule.in_registers,
        "warps": schedule.warps,
        "stages": schedule.stages,
    }
