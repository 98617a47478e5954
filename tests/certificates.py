"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

CURVE = "ec -pkeyopt ec_paramgen_curve:P-256"


def make_certificate(directory: Path, name: str = "box", key_type: str = CURVE) -> tuple[Path, Path]:
    """Return the files of a certificate for 127.0.0.1, signed by itself, and of its key."""
    cert, key = directory / f"{name}.crt", directory / f"{name}.key"
    options = f"-x509 -newkey {key_type} -nodes -days 2 -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", *options.split(), "-subj", f"/CN={name}", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return cert, key
