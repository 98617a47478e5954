"""The bytes and tables of attention and recurrent state.  The supervisor owns every id; this package only obeys."""
