"""Certificates as tests need them, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificates(folder: Path) -> None:
    """An authority of its own, and a server and a client that it vouches for."""
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    commands = [f"req -x509 {key} -keyout ca.key -out ca.crt -days 2 -subj /CN=authority"]
    for name in ("server", "client"):
        commands += [
            f"req {key} -keyout {name}.key -out {name}.csr -subj /CN=localhost",
            f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out {name}.crt"
            " -days 2 -extfile names",
        ]
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


def tls_settings(folder: Path, port: int, asks_clients: bool = False) -> dict[str, str]:
    """A Redis server's settings to speak TLS at that port with these certificates."""
    return {
        "tls-port": str(port),
        "tls-auth-clients": "yes" if asks_clients else "no",
        "tls-cert-file": str(folder / "server.crt"),
        "tls-key-file": str(folder / "server.key"),
        "tls-ca-cert-file": str(folder / "ca.crt"),
    }
