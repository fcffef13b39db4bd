"""The snapshot management process (SMP) of a node, and a rank's connection to it.

- ``smp``        the process: a loop around ``protocol.state_machine``
- ``queries``    what it answers itself, ``slot_reads`` what it answers to ranks of any node
- ``limits``     its file descriptors and its place among what the kernel may kill
- ``record``     its version, for processes that cannot talk to it
- ``memory``     its memory, allocated only if it is really available
- ``supervisor`` starts the persister, a child of the SMP, again whenever it dies
- ``launch``     finds, starts, asks and stops the SMP of a run directory
- ``host``       starts it in another cgroup than the trainer's, if a process does so there
- ``session``    a rank's requests to the SMP
- ``addresses``  the address of a node for the others
- ``membership`` the ranks of all nodes, and their agreements
- ``locks``      exclusive locks between processes
"""
