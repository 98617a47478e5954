"""Engine events to what clients read: text, reasoning, tool calls, JSON and server-sent events."""
