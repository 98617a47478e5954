"""Weights of a shard: read from GGUF files, dequantised or packed, placed on a device."""
