"""What the kernels for Hopper ask of the device that they will run on."""

import jax

SMS = 132
"""Multiprocessors of an H100 SXM or H200, the answer where no GPU can be asked."""


def wrong_device() -> str | None:
    """Why no kernel for Hopper runs on this process's GPU; None if they do, or there is none."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    if device.compute_capability != "9.0":
        have = device.compute_capability
        return f"kernels for compute capability 9.0 do not run on this device's {have}"
    if not getattr(device, "core_count", 0):
        return "the device does not tell how many multiprocessors it has"
    return None


def multiprocessors() -> int:
    """How many the device has, of one that is not wrong."""
    return jax.local_devices()[0].core_count if jax.default_backend() == "gpu" else SMS
