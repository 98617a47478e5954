"""Runs schemathesis over the served OpenAPI document, against a scripted model: no 5xx, no answer against the schema.

python -m tests.clients.schema [EXAMPLES]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.run import environment

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main(examples: str) -> int:
    """Return schemathesis's exit code."""
    st = environment("schema").with_name("st")
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory, "answer.txt")
        text.write_text("Hello there.")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.clients.scripted_server", "0", str(text)], text=True, stdout=subprocess.PIPE
        )
        try:
            assert server.stdout is not None
            document = f"{server.stdout.readline().strip()}/openapi.json"
            options = ["--max-examples", examples, "--phases", "fuzzing,coverage", "--checks", CHECKS, "--seed", "16"]
            command = [str(st), "run", document, *options, "--no-color"]
            return subprocess.run(command, cwd=directory, check=False).returncode
        finally:
            server.kill()
            server.communicate()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1] if len(sys.argv) > 1 else "50"))
