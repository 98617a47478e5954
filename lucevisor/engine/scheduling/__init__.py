"""Who starts, and what the next step computes: the scheduler with its queue, admission, batches and chunks."""
