"""Ends a launcher's children when the launcher has gone: `python -m infra.reaper TOKEN`.

Reads the children's pids and creation times, one child a line, from a pipe on stdin. The pipe's
other end lives in the launcher alone, so end-of-file means that the launcher ended, however it
ended (SIGKILL too). Whatever then still runs of the group is killed. Descriptors inherited from
the launcher (the lock on its state folder) stay held until that is done, so that a successor
never meets a half-dead store.
"""

from __future__ import annotations

import sys

from infra.processes import kill_group


def main() -> None:
    fields = [line.split() for line in sys.stdin]
    kill_group(sys.argv[1], [(int(pid), float(created)) for pid, created in fields])


if __name__ == "__main__":
    main()
