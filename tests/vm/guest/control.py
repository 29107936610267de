"""A running farside's control socket, as a program uses it: one JSON object a line."""

import json
import socket
from pathlib import Path

from guest.shell import Failed

#: where targets of cases have theirs: on the scratch disk, which is cleared after each case
SOCKET = Path("/run/scratch/control.sock")


class Control:
    """One connection. A target serves it when `SOCKET` is the argument of its `--control`."""

    def __init__(self):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(SOCKET))
        self._lines = self._socket.makefile("rw")

    def ask(self, op: str, **fields):
        """What the target answers; a refusal is a failure."""
        self._lines.write(json.dumps({"op": op} | fields) + "\n")
        self._lines.flush()
        said = self._lines.readline()
        answer = json.loads(said) if said else {"error": "the connection was closed"}
        if "error" in answer:
            raise Failed(f"{op}: {answer['error']}")
        return answer["ok"]

    def counters(self) -> dict[str, int]:
        return self.ask("status")["counters"]

    def close(self) -> None:
        self._socket.close()
