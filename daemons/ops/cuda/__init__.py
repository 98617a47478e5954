"""Kernels in CUDA C++ for NVIDIA GPUs from sm_80 on, beside the Triton kernels that every GPU runs.

``compiler`` turns sources into machine code with NVRTC, ``driver`` loads and launches it, the other modules are the
kernels' launchers.  Imported only for CUDA devices.  Invariant: no launch synchronises with the host.
"""
