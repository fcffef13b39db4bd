"""Snapshots of training state: in memory that outlives the trainer (rung 3), on disk (rung 5).

Each package says what its modules are for. In the order in which a snapshot passes them:

- ``client``    runs in the trainer: ``holdfast.Snapshots``, and the thread that copies
- ``layout``    a state as one buffer and its description; which rank keeps which share of it
- ``parity``    stripes over the nodes of a group, and the code that replaces lost ones
- ``protocol``  the decisions of the snapshot management process (SMP), without I/O
- ``node``      the SMP with its memory and its start, and a rank's connection to it
- ``transport`` frames over the node's Unix socket, and authenticated links between nodes
- ``disk``      the process that writes checkpoints, their files, and exports for stock tools
- ``restore``   the newest step that all ranks can load: from memory, rebuilt, or from disk

``protocol`` imports none of the other packages. The SMP imports no torch, and NumPy only when it
needs it, so that it starts in a fraction of a second.
"""
