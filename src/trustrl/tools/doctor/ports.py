"""Checks for Ray and vLLM sockets that other machines can reach. Linux only, since it reads /proc.

Ray runs any code it receives, and vLLM's server answers any client, so neither should be exposed to a network.
"""

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trustrl.tools.doctor import Finding

LISTENING = "0A"
DASHBOARD, CLIENT = 8265, 10001
"""Ray ports that accept jobs and code by design."""


class Socket(NamedTuple):
    """A listening socket and the process that owns it."""

    address: str
    port: int
    pid: int
    program: str
    """Either ray or vllm."""


def check(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Yields one finding per socket that other machines can reach."""
    if not (proc / "net" / "tcp").exists():
        yield Finding(
            "note", "ports were not checked", "The check reads /proc, which only Linux has.",
            "List the sockets that ray and vllm listen on with a tool of your system.",
        )  # fmt: skip
        return
    for socket in exposed(proc):
        where = f"{socket.program} (process {socket.pid}) listens on {socket.address} port {socket.port}"
        if socket.program == "ray" and socket.port in (DASHBOARD, CLIENT):
            why = "Anyone who can reach it can run code on this machine as your user."
            do = "Start Ray with dashboard_host=127.0.0.1, set RAY_AUTH_MODE=token, or close the port in the firewall."
            yield Finding("error", where, why, do)
        else:
            why = "Machines on the same network can reach it, and it does not authenticate clients by default."
            do = "On a single machine, bind it to 127.0.0.1. On a cluster, keep it inside a private network."
            yield Finding("warning", where, why, do)


def exposed(proc: Path) -> list[Socket]:
    """Returns the non-loopback listening sockets of this user's ray and vllm processes, without duplicates."""
    inodes = {inode: (address, port) for address, port, inode in _listening(proc)}
    sockets = []
    if inodes:
        for pid, program in _processes(proc):
            for inode in _sockets_of(proc / pid / "fd"):
                if inode in inodes:
                    address, port = inodes.pop(inode)  # child processes hold their parent's sockets too
                    sockets.append(Socket(address, port, int(pid), program))
    return sorted(sockets, key=lambda socket: socket.port)


def _listening(proc: Path) -> Iterator[tuple[str, int, str]]:
    for name in ("tcp", "tcp6"):
        file = proc / "net" / name
        for line in file.read_text().splitlines()[1:] if file.exists() else []:
            fields = line.split()
            if fields[3] != LISTENING or int(fields[7]) != os.getuid():
                continue
            host, port = fields[1].split(":")
            address = readable(host)
            if not address.is_loopback:
                yield str(address), int(port, 16), fields[9]


def readable(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parses an address in the kernel's format: 32-bit words in the machine's byte order.

    Example:
        >>> readable("0100007F"), readable("00000000000000000000000001000000")
        (IPv4Address('127.0.0.1'), IPv6Address('::1'))
    """
    words = bytes.fromhex(text)
    packed = b"".join(words[offset : offset + 4][::-1] for offset in range(0, len(words), 4))
    address = ipaddress.ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address


def _processes(proc: Path) -> Iterator[tuple[str, str]]:
    """Yields process id and program of this user's Ray and vLLM processes, identified by their command lines."""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # the process has ended
        program = program_of(command)
        if program:
            yield folder.name, program


def program_of(command: str) -> str | None:
    """Returns ray or vllm if the command line is one of theirs, else None.

    Example:
        >>> program_of("ray::IDLE"), program_of("/env/bin/python -m vllm.entrypoints.openai.api_server")
        ('ray', 'vllm')
        >>> program_of("vim notes-on-ray.md") is None
        True
    """
    if re.search(r"\bray::|-packages/ray/|\bray (start|job)\b|\braylet\b|\bgcs_server\b", command):
        return "ray"
    if re.search(r"VLLM::|-packages/vllm/|\bvllm[. ](entrypoints|serve)|\btrl vllm-serve\b", command):
        return "vllm"
    return None


def _sockets_of(folder: Path) -> Iterator[str]:
    try:
        for link in folder.iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        return
