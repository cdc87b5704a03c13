"""SLURM's three programs that workers are started with, for machines without SLURM: jobs are
processes of this machine. `install` writes them; as programs they run this file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

STATE = "SLURM_STAND_IN"
REFUSAL = "sbatch: error: invalid partition specified: nowhere"


def install(folder: Path) -> Path:
    """Writes sbatch, squeue and scancel; returns the folder for the PATH."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in ("sbatch", "squeue", "scancel"):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        path.chmod(0o755)
    return programs


def jobs(folder: Path) -> dict[str, psutil.Process]:
    """Id -> the process of each job that has not ended."""
    found = {}
    for record in folder.glob("*.pid"):
        pid, created = record.read_text().split()
        try:
            process = psutil.Process(int(pid))
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        if alive and process.create_time() == float(created):
            found[record.stem] = process
    return found


def _sbatch(folder: Path, script: Path) -> None:
    if "-p nowhere" in script.read_text():
        sys.exit(REFUSAL)
    number = str(1000 + len(list(folder.glob("*.sh"))))
    kept = shutil.copy(script, folder / f"{number}.sh")  # sbatch keeps a copy, too
    with (folder / f"{number}.log").open("w") as log:
        job = subprocess.Popen(["bash", kept], stdout=log, stderr=log, start_new_session=True)
    (folder / f"{number}.pid").write_text(f"{job.pid} {psutil.Process(job.pid).create_time()}")
    print(f"{number};stand-in")


def main() -> None:
    program, *arguments = sys.argv[1:]
    folder = Path(os.environ[STATE])
    match program:
        case "sbatch":
            _sbatch(folder, Path(arguments[-1]))
        case "squeue":
            print("\n".join(jobs(folder)))
        case "scancel":
            for number, process in jobs(folder).items():
                if number in arguments:
                    os.killpg(process.pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
