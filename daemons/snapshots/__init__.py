"""State of a shard's layers to and from the snapshot file that the supervisor opened."""
