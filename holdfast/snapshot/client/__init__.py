"""The part of snapshots that runs in the trainer.

- ``snapshots``  ``holdfast.Snapshots``; ``settings`` are its keywords
- ``copier``     the thread that copies a state to the snapshot process
- ``shards``     copies a rank's share of a state, and computes its parities
- ``pacing``     chooses the number of steps between snapshots for ``interval="auto"``
"""
