"""A recommendation model served while its memory and its arithmetic are being damaged.

``python -m examples.dlrm`` quantises a DLRM, serves it from several threads with Zipf-distributed
indices, and injects faults while it does. See ``--help``.

- ``model``    the model in float and quantised
- ``requests`` what users ask for, the same for the same seed
- ``serving``  threads that answer requests, and how long that takes
- ``faults``   what is damaged meanwhile
"""
