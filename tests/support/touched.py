"""What a command does to the world around it, from Python's own audit events, in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from support.sockets import listening, tree

WATCHED = """
import json, os, sys
seen = set()
NAMES = {"socket.connect", "socket.sendto", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def hook(event, args):
    if event == "open" and isinstance(args[0], str) and args[2] and args[2] & WRITES and not os.path.isdir(args[0]):
        seen.add(("write", os.path.realpath(args[0])))
    elif event == "socket.bind":
        seen.add((event, str(args[1])))
    elif event == "subprocess.Popen":
        seen.add((event, json.dumps([str(one) for one in args[1]])))
    elif event == "pickle.find_class":
        seen.add((event, args[0]))
    elif event in NAMES:
        seen.add((event, repr(args)[:200]))

sys.addaudithook(hook)
from trustrl.cli import main
code = main(sys.argv[2:])
found = sorted(seen)
with open(sys.argv[1], "w") as file:
    json.dump([code, found], file)
"""


def touched(folder, *arguments, **environment):
    """Runs `trustrl` in a folder; returns its exit code, its audit events as pairs, and the addresses it listened on.

    The events are of Python code in its own process; the addresses, sampled, are of all its processes. Once one is
    found, the file `FOLDER.listening` beside the folder says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    events = folder.parent / f"{folder.name}.events.json"
    command = [sys.executable, "-B", "-c", WATCHED, str(events), *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
        **environment,
    }
    listened = set()
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            listened |= listening(*tree(process.pid))
            if listened:
                (folder.parent / f"{folder.name}.listening").touch()
            time.sleep(0.2)
        log.seek(0)
        assert events.exists(), log.read()[-3000:]
    code, found = json.loads(events.read_text())
    return code, {(kind, what) for kind, what in found}, listened


def written_outside(events, *folders):
    """The files that were opened for writing outside some folders."""
    inside = [Path(one).resolve() for one in folders]
    files = {Path(what) for kind, what in events if kind == "write"} - {Path(os.devnull)}
    return {str(file) for file in files if not any(file.is_relative_to(folder) for folder in inside)}
