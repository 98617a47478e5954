"""C++ kernels for x86 cpus with AVX2 or AVX-512, compiled at load."""
