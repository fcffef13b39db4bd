"""Messages between processes and nodes.

- ``frames``  frames with file descriptors over the run directory's Unix socket
- ``channel`` a connection that never blocks the SMP
- ``links``   authenticated TCP among the SMPs; ``remote`` is a rank's end of it
"""
