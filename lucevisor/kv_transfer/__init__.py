"""State on its way out of daemons and back: host memory and its budget, transfers, preempted requests, exports."""
