"""A certificate for tests of encrypted links."""

import subprocess
from pathlib import Path

from snapshot_waits import PATIENCE_S


def certificate(folder: Path) -> tuple[str, str, str]:
    """Make a node's certificate and key; return them and the authority, which is the first."""
    files = str(folder / "node.pem"), str(folder / "node.key")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-subj", "/CN=node", "-out", files[0], "-keyout", files[1]]
    subprocess.run(make, check=True, capture_output=True, timeout=PATIENCE_S)
    return *files, files[0]
