"""The snapshot management process (SMP) of a node.

- ``smp``        the process: a loop around ``protocol.state_machine``
- ``memory``     its memory, checked against what is really available
- ``supervisor`` the persister as the SMP sees it: a child that is started anew whenever it dies
- ``launch``     finds, starts, asks and stops the SMP of a run directory
- ``locks``      exclusive locks between processes
"""
