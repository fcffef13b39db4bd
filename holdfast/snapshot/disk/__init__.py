"""Checkpoints on disk.

- ``persister``       the process that writes them
- ``checkpoints``     a folder of checkpoints, each complete or not there at all
- ``persist_format``  the files of one checkpoint
- ``export``, ``dcp`` a step as files for stock tools
"""
