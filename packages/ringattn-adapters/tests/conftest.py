# SPDX-License-Identifier: Apache-2.0
"""What every test of the adapters stands on: eight CPU devices, strict promotion, and no setting of the shell."""

import importlib.util
import os

os.environ["JAX_PLATFORMS"] = "cpu"
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
for variable in [name for name in os.environ if name.startswith("RINGATTN_")]:
    del os.environ[variable]

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")

# `nox -s hosts` installs the released libraries.
collect_ignore = [] if importlib.util.find_spec("levanter") else ["test_released_hosts.py"]
