"""`lucevisor chaos`: real traffic beside random faults, every answer checked."""
