"""Algorithm-based fault tolerance: operators that find and repair wrong results themselves."""
