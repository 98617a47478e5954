"""`python -m daemons`: see daemons/main.py.

Reports in one line what an interpreter lacks, before importing anything that needs it; runs on any Python 3.
"""

import os
import sys

EXIT_CONFIGURATION = 78  # as in lucevisor/protocol/process.py, which may not be importable here

if sys.version_info < (3, 11):  # noqa: UP036 - a group's interpreter is the user's choice, not this project's
    print(f"Python {sys.version.split()[0]} of {sys.executable} is too old: 3.11 is the least", file=sys.stderr)
    sys.exit(EXIT_CONFIGURATION)

try:
    from daemons.main import main
except ImportError as error:
    print(f"{error}: install torch, numpy, gguf and msgspec for {sys.executable}", file=sys.stderr)
    sys.exit(EXIT_CONFIGURATION)

code = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # a thread that still compiles kernels would abort the process in its C++ when the interpreter ends
