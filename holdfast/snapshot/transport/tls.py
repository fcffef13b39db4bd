"""Encryption of the connections between nodes, if the user gives certificates.

Every node has a certificate of a common authority, and both sides check the other's. The name in it
is not compared, because nodes are reached by address: the run's secret says who belongs to the run.
"""

import socket
import ssl
from functools import cache

from holdfast import config
from holdfast.errors import ConfigError


def check() -> None:
    """Raise ConfigError if this process is to encrypt and cannot."""
    if files := config.tls_files():
        _context(files, server=False)


def wrapped(sock: socket.socket, *, server: bool) -> socket.socket:
    """Return an accepted socket (``server``), or one that is still to be connected.

    It is encrypted if the user wants it; its handshake is still due.
    """
    if not (files := config.tls_files()):
        return sock
    context = _context(files, server=server)
    return context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)


@cache
def _context(files: tuple[str, str, str], *, server: bool) -> ssl.SSLContext:
    certificate, key, authority = files
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    try:
        made.load_cert_chain(certificate, key)
        made.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the certificates {', '.join(files)} cannot be used: {error}; correct "
            f"{', '.join(config.TLS_VARIABLES)}, or unset all three"
        ) from error
    return made
