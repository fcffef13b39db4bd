"""Faults in everything that a training step computes, one at a time, and what became of each."""
