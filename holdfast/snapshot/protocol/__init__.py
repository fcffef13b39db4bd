"""The SMP's decisions: events in, instructions out; no I/O, no clock, no torch, no NumPy.

- ``messages``            events and instructions; ``roster`` names nodes, epochs and steps
- ``state_machine``       takes the events; its parts decide over the same ``slots``:
- ``steps``               a step from ``begin`` to committed or aborted
- ``cluster_commit``      a step until every node holds it; ``cluster`` is the exchange with the
  other nodes, ``cluster_steps`` their progress, ``sizes`` the sizes of their states
- ``parity_plan``, ``parity_stream``  blocks on their way to the nodes that keep their parities
- ``restore_agreement``   the local ranks' agreement on the step to restore
- ``leases``              readers of clean steps; ``checkpoint_schedule`` when nodes write to disk
"""
