"""Which page holds what: page pools, page tables, prefix tree and prefix cache.

Plain integers: no tensors, no I/O, no clock.
"""
