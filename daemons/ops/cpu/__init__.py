"""C++ kernels for cpus with AVX-512 and bfloat16 products, compiled at load."""
