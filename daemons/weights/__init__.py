"""Weights of a shard: reading GGUF tensors, dequantising and packing them."""
