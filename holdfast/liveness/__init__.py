"""Whether a run goes on: ranks that hang, and ranks that are slower than the others.

Each rank's Guard has a thread (``watchdog``) that sees how long ago the last step ended. Ranks
whose step does not end tell each other where they are (``answers``), so that the rank for which the
others wait is named (``verdict``). ``pace`` compares the time that each rank computes itself.
"""
