"""KV cache and recurrent state: pools, page tables, batches.  The supervisor assigns every id."""
