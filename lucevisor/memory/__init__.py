"""Who owns which page: allocators and page tables.  Plain integers; no tensors, no I/O, no clock."""
