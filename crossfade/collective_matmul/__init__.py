"""Collective matmuls: kernels of matmuls that run piece by piece beside a collective. Importing this registers them.

Also known as async tensor parallelism (torch), windowed einsum (XLA), and tensor-parallel overlap (Megatron).
"""

from crossfade.collective_matmul import operators

__all__ = ["operators"]
