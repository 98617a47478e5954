"""The draft stage of speculative decoding."""
