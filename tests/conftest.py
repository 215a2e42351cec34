"""Settings for the whole run, made before anything imports jax: a CPU with eight devices, and hypothesis' profiles."""

import os
import signal

from hypothesis import settings

# Eight pretended devices: shardings are tested on any machine. Both variables are read when jax starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# A deadline per example fails on a busy machine, not on slow code. CI draws the same examples each time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# A shell starts what goes on in its background deaf to interrupts, and children inherit that: tests of interrupts would
# wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
