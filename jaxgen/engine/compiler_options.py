"""What the compiler is told beside the program: XLA's defaults, but for products on GPUs."""

from jax.sharding import Mesh

_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""XLA would try dozens of Triton kernels and cuBLAS algorithms for each product, on a device that
compiles other programs meanwhile: 10 to 20 s a program, memory that the KV cache has taken, and now
and then a choice three times slower than the next (a step of 152 ms instead of 47). cuBLAS's own
choice is as fast as the best of them, and the same at every start.
"""


def compiler_options(mesh: Mesh) -> dict[str, bool | int]:
    """For `jax.jit`, of programs that run on this mesh."""
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return dict(_GPU_OPTIONS) if on_gpu else {}
