"""Other implementations of the same layer, timed where their packages are installed."""
