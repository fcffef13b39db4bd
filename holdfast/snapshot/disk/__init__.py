"""Checkpoints on disk and in object stores.

- ``persister``       the process that writes them
- ``checkpoints``     a folder of checkpoints, each complete or not there at all
- ``remote_checkpoints``  the same in an ``object_store``: staged in a folder, then uploaded
- ``persist_format``  the files of one checkpoint
- ``export``, ``dcp`` a step as files for stock tools
"""
