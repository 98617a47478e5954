"""Which device holds which layers, how large the pools are, what fits, and why.  Pure: no device is touched."""
