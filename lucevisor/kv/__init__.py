"""Page pools, page tables, packed tokens, prefix tree and prefix cache.

Plain integers and bytes: no tensors, no I/O, no clock.
"""
