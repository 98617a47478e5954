"""The HTTP API: JSON in, token ids to the engine, JSON or server-sent events out.  JSON shapes live nowhere else."""
