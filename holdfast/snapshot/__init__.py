"""In-memory snapshots of training state that outlive the trainer (rung 3 of the ladder).

A guided tour, pure parts first:

- ``messages``  what a rank may say to the SMP and what the SMP may be told to do, as dataclasses
- ``protocol``  the SMP's decisions: slots, node-atomic commit, agreement on a restore; no I/O
- ``slots``     the records that ``protocol`` decides over
- ``layout``    a nested state as one flat buffer of tensors, and back
- ``manifest``  what lies where in that buffer, with digests
- ``state``     which state a training run consists of, and how it is put back bit for bit
- ``transport`` frames with file descriptors over the run directory's Unix socket
- ``memory``    memfd buffers, checked against the memory that is really available
- ``peer``      one connection as the SMP sees it
- ``smp``       the snapshot management process: a thin loop around ``protocol``
- ``launch``    finding, starting, asking and stopping the SMP of a run directory
- ``session``   one rank's conversation with the SMP
- ``inflight``  the copy in flight, and whether the model held still meanwhile
- ``restore``   one rank's part in the agreement on the step to restore
- ``client``    ``holdfast.Snapshots``

``messages``, ``slots``, ``protocol``, ``transport``, ``memory``, ``peer`` and ``smp`` are all that
the SMP imports; they never import torch, so that it starts in a fraction of a second.
"""
