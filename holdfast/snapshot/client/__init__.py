"""The part of snapshots that runs in the trainer.

- ``snapshots``  ``holdfast.Snapshots``; ``settings`` are its keywords
- ``copier``     the thread that copies a state to the snapshot process
- ``outage``     trouble with snapshots, which never ends the training
- ``ownership``  the id that a run's ranks share, and the checkpoints that are its own
- ``shards``     copies a rank's share of a state, and computes its parities
- ``pacing``     chooses the number of steps between snapshots for ``interval="auto"``
"""
