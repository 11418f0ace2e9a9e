# SPDX-License-Identifier: Apache-2.0
"""Lines of core that are broken one at a time, to see that `nox -s quick` catches each.

    python -m ringattn_testing.broken_lines [WORD ...]

breaks a copy of core at each line (whose file or promise has one of these words in it), runs the tests of the promise
that the line keeps, and says which test caught it. Who changes such a line writes the new one here.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import ringattn_core


class Broken(NamedTuple):
    """A line of a file of core, what stands in its place, and which promise of `quick.PROMISES` this breaks."""

    promise: str
    file: str
    line: str
    instead: str


BROKEN: Final = (
    # The ring: whose keys a rank has, where gradients go, and what they are.
    Broken("rings", "ring/plan.py", "(number - distance) % self.ranks", "(number + distance) % self.ranks"),
    Broken("rings", "ring/plan.py", "_steps((*far, self.ranks))", "_steps((*far, self.ranks + 1))"),
    Broken("rings", "ring/backward.py", "products.sum(-1), 1, 2) - dlse", "products.sum(-1), 1, 2)"),
    Broken("rings", "ring/backward.py", "return -jnp.einsum(", "return jnp.einsum("),
    Broken("rings", "ring/backward.py", "jax.tree.map(jnp.add, sums.dparams, dparams)", "dparams"),
    # What a query sees, and dropout.
    Broken("rings", "contract/visibility.py", "(ids == kv_ids) & (ids >= 0)", "ids == kv_ids"),
    Broken("rings", "contract/visibility.py", "else by_mask[:, mask_of_head]", "else by_mask[:, mask_of_head * 0]"),
    Broken("rings", "masks/reach.py", "moved(positions, -self.left)", "moved(positions, 1 - self.left)"),
    Broken("rings", "contract/dropout.py", "(index >> 4) << 3", "(index >> 5) << 3"),
    # Meshes and strategies.
    Broken("strategies", "strategies/ulysses.py", "jax.lax.axis_index(axis) * share, share, heads", "0, share, heads"),
    Broken("strategies", "ring/all_gather.py", "if ring.all_gather else whole", "if False else whole"),
    Broken("rings", "strategies/balance.py", "2 * axes.coordinate(axis) < ranks", "2 * axes.coordinate(axis) <= ranks"),
    # Numbers.
    Broken("numbers", "ring/forward.py", "final=not ring.levels", "final=True"),
    Broken("numbers", "ring/forward.py", "jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)", "sinks"),
    Broken("numbers", "contract/visibility.py", "bias < BIAS_FORBIDS", "bias == -jnp.inf"),
    Broken("numbers", "ring/backward.py", "zero_padding(dout, ids), jnp", "dout, jnp"),
    # Caches.
    Broken("cache", "contract/merge.py", "jnp.exp(part.lse - safe) for", "jnp.exp2(part.lse - safe) for"),
    Broken("cache", "placement/layout.py", "2 * self.count - 1 - chunk, chunk", "2 * self.count - chunk, chunk"),
    # What travels.
    Broken("memory", "ring/plan.py", "(int(seen[-1]) + 1) * tile", "int(seen[-1]) * tile"),
    # Refusals and the interface.
    Broken("refused", "call/validation.py", "if x.dtype != q.dtype:", "if False:"),
    Broken("refused", "backends/selection.py", "if x in required and not backend.supports(x)", "if False"),
    Broken("refused", "backends/selection.py", "else -backend.priority", "else backend.priority"),
    Broken("interface", "backends/discovery.py", "if backend.api not in API_VERSIONS:", "if False:"),
    Broken("imports", "__init__.py", "from . import errors, masks",
           "from . import errors, masks\nimport jax.experimental.pallas"),
)  # fmt: skip
_CAUGHT: Final = re.compile(r"^ {24}(\S.*)$", re.MULTILINE)


def caught_by(broken: Broken, folder: Path) -> str | None:
    """The test that fails first with that line broken; `None` if all pass."""
    source = Path(ringattn_core.__file__).parent
    copy = shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / broken.file
    text = file.read_text()
    assert text.count(broken.line) == 1, f"{broken.file} has {text.count(broken.line)} times {broken.line!r}"
    file.write_text(text.replace(broken.line, broken.instead))
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "ringattn_testing.quick", "--first", "--only", broken.promise]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if not done.returncode:
        return None
    found = _CAUGHT.search(done.stdout)
    return found[1] if found else f"no test could run: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def main(words: list[str]) -> int:
    asked = [one for one in BROKEN if not words or any(word in one.promise + one.file for word in words)]
    missed = 0
    for one in asked:
        with tempfile.TemporaryDirectory() as folder:
            by = caught_by(one, Path(folder))
        missed += by is None
        print(f"{one.file}: {one.line!r} -> {one.instead!r}\n    {by or 'MISSED'}", flush=True)
    print(f"{len(asked) - missed} of {len(asked)} broken lines are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
