"""Messages to a process that reads one JSON object a line, and answers in the same way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any


def tell(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
    """Write one line to the process. One that has died is told nothing: reading its answer says so."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass
