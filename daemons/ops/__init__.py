"""Operations of model blocks: functions and small callables over tensors, without state, families or files."""
