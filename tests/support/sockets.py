"""The addresses on which processes listen, from the kernel's own tables. Linux only."""

import ipaddress
import os
from pathlib import Path

LISTENING = "0A"


def listening(*pids):
    """The addresses on which these processes listen; this process without any."""
    held = set()
    for pid in pids or (os.getpid(),):
        for entry in _entries(f"/proc/{pid}/fd"):
            try:
                held.add(os.readlink(entry))
            except OSError:
                continue  # closed in between, or the process has ended
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in held:
                host, port = fields[1].split(":")
                found.add((_address(host), int(port, 16)))
    return found


def tree(pid):
    """A process and all that descend from it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _entries(folder):
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _address(text):
    words = bytes.fromhex(text)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    address = ipaddress.ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address
