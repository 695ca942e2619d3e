"""Key of this installation. It signs the manifests of checkpoints, because hashes do not prove who wrote a file."""

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.files import sync

VARIABLE = "TRUSTRL_KEY_FILE"
"""Environment variable with the path of the key, for machines that share runs."""

SIZE = 32
PURPOSE = b"trustrl checkpoint manifest\n"
"""Prefix of every signed text, so that a signature is valid for manifests only."""


@dataclass(frozen=True, slots=True)
class Key:
    """Secret of an installation."""

    secret: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """Public name of the key. It tells a manifest of another installation from a damaged one."""
        return hashlib.sha256(b"trustrl key name\n" + self.secret).hexdigest()[:16]

    def signature(self, content: Mapping[str, Any]) -> str:
        """Returns HMAC-SHA256 of the content as canonical JSON: sorted keys, no spaces, ASCII."""
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hmac.new(self.secret, PURPOSE + text.encode("ascii"), hashlib.sha256).hexdigest()

    def signed(self, content: Mapping[str, Any], signature: str) -> bool:
        """Returns True if this key made the signature of the content."""
        return hmac.compare_digest(self.signature(content).encode(), signature.encode("utf-8", "replace"))


def key_file() -> Path:
    """Returns the path of the key: `$TRUSTRL_KEY_FILE`, or `trustrl/key` in the user's state directory."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state, "trustrl", "key")
    try:
        return Path.home() / ".local" / "state" / "trustrl" / "key"
    except RuntimeError:
        raise ConfigError(f"This user has no home directory. Set {VARIABLE} to the path of a key file.") from None


def load_key(log: Callable[[str], None]) -> Key:
    """Returns the key of this installation. Creates it if there is none, and logs that."""
    file = key_file()
    try:
        if _created(file):
            log(f"made a key that signs checkpoints: {file}")
        return Key(_read(file))
    except OSError as error:
        raise ConfigError(
            f"The key that signs checkpoints must be a file that you can read and write, got {file}: "
            f"{error.strerror} ({error.filename}). Set {VARIABLE} to another path."
        ) from None


def _created(file: Path) -> bool:
    """Creates the key unless the path exists. It appears with its whole content, because other runs may read it now."""
    if os.path.lexists(file):
        return False
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    secret = secrets.token_bytes(SIZE)
    try:
        _write_new(scratch, secret)
        try:
            os.link(scratch, file)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            _write_new(file, secret)
        sync(file.parent)  # a key that a power failure loses makes its checkpoints a stranger's
        return True
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            scratch.unlink()


def _write_new(file: Path, content: bytes) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    with os.fdopen(handle, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(handle)


def _read(file: Path) -> bytes:
    if file.is_symlink():
        raise _refusal(file, "a symbolic link")
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(file, os.O_RDONLY | flags)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(file, "another kind of file")
        if hasattr(os, "geteuid"):  # Windows has no user ids
            if status.st_uid != os.geteuid():
                raise _refusal(file, f"a file of the user with id {status.st_uid}")
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise _refusal(file, f"mode {stat.S_IMODE(status.st_mode):04o}, which lets other users use it")
        secret = os.read(handle, SIZE + 1)
    finally:
        os.close(handle)
    if len(secret) != SIZE:
        raise _refusal(file, f"{'more than ' * (len(secret) > SIZE)}{min(len(secret), SIZE)} bytes")
    return secret


def _refusal(file: Path, got: str) -> ConfigError:
    return ConfigError(
        f"The key that signs checkpoints must be a regular file of {SIZE} bytes that you own, with mode 0600, got "
        f"{got}: {file}. Mend it (`chmod 600`), remove it to get a new key, or set {VARIABLE} to another path. "
        "Checkpoints signed with a lost key need --trust-checkpoint once."
    )
