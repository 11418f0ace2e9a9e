# SPDX-License-Identifier: Apache-2.0
"""What `import ringattn_core` adds to `import jax`, whether it imports a backend, and how long discovery takes."""

import argparse
import json
import statistics
import subprocess
import sys

from interleaved import Claim, report

PROBE = """
import json, sys, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import ringattn_core
end = time.perf_counter()
ringattn_core.ring_attention
used = time.perf_counter()
backends = {"ringattn_xla", "ringattn_triton", "ringattn_tpu"}.intersection(sys.modules)
from ringattn_core.backends import discovery
before = time.perf_counter()
found = discovery.registrations()
after = time.perf_counter()
print(json.dumps({
    "import jax, ms": 1e3 * (middle - start),
    "import ringattn_core after it, ms": 1e3 * (end - middle),
    "first use of a name in it, ms": 1e3 * (used - end),
    "first discovery, ms": 1e3 * (after - before),
    "backends imported": len(backends),
    "backends found": len(found),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    samples = []
    for number in range(rounds + 1):
        output = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
        if number:  # the first run brings the files into the page cache
            samples.append(json.loads(output))
    raw = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    claims = [
        Claim("import ringattn_core adds", raw["import ringattn_core after it, ms"], "<=", 60, "ms"),
        Claim("backends that it imports", raw["backends imported"], "<=", 0),
        Claim("discovery", raw["first discovery, ms"], "<=", 5, "ms"),
        Claim("backends discovered", raw["backends found"], ">=", 1),
    ]
    report("import_time.py", claims, raw)


if __name__ == "__main__":
    main()
