# SPDX-License-Identifier: Apache-2.0
"""Runs the suite's core tier against other libraries of attention, and prints one table of what passed.

A library declares what it documents. A call that it does not document, and that no feature names, is left out by
`pytest.skip`.
`python conformance/scores.py` runs each library in an environment of its own, made by uv from its newest release.
Python 3.12 or newer, because two of the libraries need it.
"""

import argparse
import collections
import dataclasses
import datetime
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

BASE: Final = ("GRADIENTS", "FLOAT32", "BFLOAT16", "FLOAT16", "CAUSAL", "GROUPED_HEADS")
DENSE: Final = ("GRADIENTS", "FLOAT32", "BFLOAT16", "CAUSAL", "GROUPED_HEADS")
"""Without FLOAT16, which `jax.nn` and tokamax cannot compile for a CPU."""
ONE_DEVICE: Final = {"emulated": True, "data": 1, "heads": 1}
"""One device plays all ranks, so that the library can make a mesh of its own."""
OF_CHECK_VMA: Final = "grad_inside_shard_map"
NO_RING: Final = f"{OF_CHECK_VMA} or error_of_a_ring_of_eight"
"""Parts of the names of tests that are left out: of `check_vma` for all libraries; of rings for those without one."""
MASKS: Final = ("SLIDING_WINDOW", "ATTENTION_MASK", "BIAS", "CROSS_LENGTHS")
HEADER: Final = (
    "| library | JAX | called as | declares | passed | unseen rows | failed | left out | what failed | date, device |\n"
    "|---|---|---|---|--:|--:|--:|--:|---|---|"
)
NOT_RUN: Final = {
    "ringattention 0.1.2": "`import ringattention` reads `jax.lib.xla_bridge`, which no supported JAX has",
    "tokamax's ring": "a private module for TPUs",
    "TransformerEngine, FlashAttention-3, FlashAttention-4's kernels": "need a GPU",
}
ROOT: Final = Path(__file__).parent.parent
TRACED: Final = []
"""One entry for each call of a library since the current test began."""


@dataclasses.dataclass(frozen=True)
class Library:
    """A library, and its attention as a ring function or, for `from_flash`, as its forward pass."""

    distribution: str
    called: str
    declares: tuple[str, ...]
    attention: Callable[..., Any]
    flash: bool = False
    placed: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How the ranks run where the library cannot run as the suite asks: fields of `ranks.Placement`."""
    left_out: str = OF_CHECK_VMA


def on_whole_sequences(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A ring function whose ranks gather all arrays, call `attend` as one device would, and keep their own rows."""

    def ring_attention(*, query: Any, key: Any, value: Any, axis_name: Any, **options: Any) -> Any:
        import jax

        def whole(x: Any, axis: int, length: int) -> Any:
            if axis_name is None or x is None or x.shape[axis] != length:
                return x
            wide = x if x.dtype == bool else x.astype("float32")  # JAX sums the gradients of all ranks in this dtype
            return jax.lax.all_gather(wide, axis_name, axis=axis, tiled=True).astype(x.dtype)

        rows, columns = query.shape[1], key.shape[1]
        q, k, v = whole(query, 1, rows), whole(key, 1, columns), whole(value, 1, columns)
        options |= {name: whole(options[name], 2, rows) for name in ("bias", "attention_mask")}
        out = attend(q, k, v, ranks=q.shape[1] // rows, **options)
        first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * rows
        return jax.lax.dynamic_slice_in_dim(out, first, rows, 1)

    return ring_attention


def dense(function: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any], **more: Any) -> Any:
    """A call of `jax.nn.dot_product_attention`, or of a function with its names."""
    window = options["sliding_window"]
    most = q.shape[1] + k.shape[1]
    return function(
        q, k, v, options["bias"], options["attention_mask"],
        scale=options["softmax_scale"], is_causal=options["causal"],
        local_window_size=window and tuple(most if side is None else min(side, most) for side in window), **more,
    )  # fmt: skip


@on_whole_sequences
def jax_nn(q: Any, k: Any, v: Any, **options: Any) -> Any:
    import jax

    with jax.default_matmul_precision("highest"):
        return dense(jax.nn.dot_product_attention, q, k, v, options)


@on_whole_sequences
def tokamax(q: Any, k: Any, v: Any, **options: Any) -> Any:
    function = importlib.import_module("tokamax").dot_product_attention
    cap = options["logits_soft_cap"]
    if cap is not None and options["bias"] is not None:
        pytest.skip("tokamax caps the sum of score and bias, the suite the score alone")
    more = {"logits_soft_cap": cap, "precision": "highest", "implementation": "xla"}
    return dense(function, q, k, v, options, **more)


@on_whole_sequences
def jax_linear_attention(q: Any, k: Any, v: Any, ranks: int, **options: Any) -> Any:
    import jax

    jla = importlib.import_module("jla.distributed.context_parallel_attention")
    left, right = options["sliding_window"] or (None, None)
    if not options["causal"] and right != 0:
        pytest.skip("causal attention only")
    sinks = options["softmax_aux"]
    return jla.context_parallel_attention(
        q, k, v, mesh=jax.make_mesh((ranks,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,)),
        scale=options["softmax_scale"], load_balance=k.shape[1] % (2 * ranks) == 0,
        sliding_window=None if left is None else left + 1,
        sinks=None if sinks is None else jax.nn.logsumexp(sinks, axis=-1),
    )  # fmt: skip


def ejkernel(*, query: Any, key: Any, value: Any, axis_name: Any, **options: Any) -> Any:
    import jax
    import jax.numpy as jnp

    library = importlib.import_module("ejkernel.kernels._xla.ring_attention")
    names = ("q_segment_ids", "kv_segment_ids", "sliding_window", "causal", "logits_soft_cap", "softmax_scale")
    axis = axis_name[0] if axis_name else None
    if options["sliding_window"] and None in options["sliding_window"]:
        pytest.skip("a window with two finite sides only")
    with jax.default_matmul_precision("highest"):
        out = library.ring_attention(query, key, value, axis_name=axis, **{name: options[name] for name in names})
    ids = options["q_segment_ids"]  # it does not know padding, whose rows are 0 here
    return (out if ids is None else jnp.where(ids[..., None, None] < 0, 0, out)).astype(query.dtype)


def fa4_jax(q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> Any:
    TRACED.append(1)
    flash_attn = importlib.import_module("fa4_jax").flash_attn
    return flash_attn(q, k, v, scale=scale, causal=causal, return_lse=True, backend="reference")


LIBRARIES: Final = {
    "jax.nn": Library("jax", "`dot_product_attention` on one device", DENSE + MASKS, jax_nn, left_out=NO_RING),
    "tokamax": Library(
        "tokamax", "`dot_product_attention`, XLA, on one device",
        (*DENSE, *MASKS, "UNEQUAL_VALUE_DIM", "SOFT_CAP"), tokamax, left_out=NO_RING,
    ),
    "jax-linear-attention": Library(
        "jax-linear-attention", "`context_parallel_attention`, ring", (*BASE, "SLIDING_WINDOW", "SINKS"),
        jax_linear_attention, placed=ONE_DEVICE,
    ),
    "ejkernel": Library(
        "ejkernel", "`ring_attention`, XLA",
        (*BASE[:-1], "SLIDING_WINDOW", "SEGMENT_IDS", "CROSS_LENGTHS", "SOFT_CAP"), ejkernel,
        placed={"check_vma": False, "emulated": False},
    ),
    "fa4-jax": Library(
        "fa4-jax", "`from_flash` of its reference backend, forward",
        (*BASE[1:], "UNEQUAL_VALUE_DIM", "SINKS", "ZIGZAG", "STRIPED"), fa4_jax, flash=True,
    ),
}  # fmt: skip


class Counter:
    """The plugin that sorts the tests that called the library: passed, failed or left out, and why."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.why: collections.Counter[str] = collections.Counter()

    def pytest_runtest_setup(self) -> None:
        TRACED.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "call" and TRACED:
            message = call.excinfo.exconly() if report.failed and call.excinfo is not None else ""
            unseen = re.search(r"^  out: .*; all in rows that see no key", message, re.MULTILINE)
            self.outcomes["unseen" if unseen else report.outcome] += 1
            if message and not unseen:
                self.why[reason(message)] += 1
            print(f"{item.name} {report.outcome} {message[:2000]}", file=sys.stderr)
        return report


def reason(message: str) -> str:
    """A failure in a few words: which results are wrong, or the error without its numbers."""
    wrong = re.findall(r"^  (?!right:)(\w+): (?!got dtype)", message, re.MULTILINE)
    dtypes = re.findall(r"^  (\w+): got dtype", message, re.MULTILINE)
    if wrong or dtypes:
        return f"{', '.join(dict.fromkeys(wrong))} wrong" if wrong else f"dtype of {', '.join(dtypes)}"
    return re.sub(r"\d+", "N", message.splitlines()[0])[:60]


def score(name: str) -> str:
    """Runs the suite against one library, in this process, and returns its row of the table."""
    from ringattn_conformance import plugin

    plugin.set_environment()  # before JAX is imported
    import jax
    from ringattn_conformance import ranks
    from ringattn_core import Backend, Feature, from_flash
    from ringattn_core.backends.discovery import registered

    library = LIBRARIES[name]

    def called(**options: Any) -> Any:
        TRACED.append(1)
        return library.attention(**options)

    def backward(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    here = ranks.Placement.here
    ranks.Placement.here = lambda self: dataclasses.replace(here(self), **library.placed)
    door: dict[str, Any] = {"kernel": "scores:KERNEL"} if library.flash else {"ring": "scores:RING"}
    kernel = from_flash(library.attention, backward) if library.flash else called
    features = tuple(Feature[feature] for feature in library.declares)
    backend = Backend(name, api=1, platforms=("cpu", "cuda", "tpu"), features=features, **door)
    counter = Counter()
    line = ["--pyargs", "ringattn_conformance.suite", "--ringattn-backend", name, "--ringattn-tier", "core"]
    line += ["-q", "-n", "0", "-p", "no:cacheprovider", "-c", os.devnull, "--tb=no", "-rN"]
    line += ["-k", f"not ({library.left_out})"]
    with registered(backend, kernel):
        pytest.main(line, plugins=[counter])
    version = importlib.metadata.version(library.distribution)
    why = "; ".join(f"{count} {what}" for what, count in counter.why.most_common())
    counts = " | ".join(str(counter.outcomes[outcome]) for outcome in ("passed", "unseen", "failed", "skipped"))
    declares = ", ".join(library.declares).lower()
    device = jax.devices()[0].device_kind
    return (
        f"| {name} {version} | {jax.__version__} | {library.called} | {declares} | {counts} | {why or '-'} "
        f"| {datetime.date.today()}, {device} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=LIBRARIES, help="one library, in this environment")
    only = parser.parse_args().only
    if only:
        print(score(only))
        return
    rows, not_run = [], NOT_RUN
    for name, library in LIBRARIES.items():
        line = ["uv", "run", "--isolated", "--no-project", "--python", sys.executable, "--with", library.distribution]
        line += ["--with-editable", str(ROOT / "packages/ringattn-core"), "--with-editable", str(ROOT / "conformance")]
        done = subprocess.run([*line, __file__, "--only", name], stdout=subprocess.PIPE, text=True, check=False)
        found = [row for row in done.stdout.splitlines() if row.startswith(f"| {name} ")]
        rows, not_run = rows + found, not_run | ({} if found else {name: "its run ended with an error"})
    print(HEADER, *rows, sep="\n")
    print("\nNot run:", *(f"- {name}: {why}." for name, why in not_run.items()), sep="\n")


if __name__ == "__main__":
    main()
