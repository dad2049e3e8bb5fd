"""pytest, and runs that are long, on many workers or on many machines."""
