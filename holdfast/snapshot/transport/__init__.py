"""Messages between processes and nodes.

- ``frames``  frames with file descriptors over the run directory's Unix socket
- ``channel`` a connection that never blocks the SMP
- ``links``   authenticated TCP between the SMPs; ``remote`` is a rank's end of such a link
"""
