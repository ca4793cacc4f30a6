"""A directory that one process has for itself below one that the operator gave. POSIX only, torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
from pathlib import Path

from arbi_core.errors import ConfigError

__all__ = ["PrivateDirectory", "open_own_directory"]

log = logging.getLogger("arbi.tiers")

_SETTING = "cache.disk_tier_dir"
_NAME = re.compile(r"arbi-(\d+)-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]{16}\.(blob|part)")
_MARKER = "arbi-disk-tier"
_NEW_MARKER = "arbi-disk-tier.new"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class PrivateDirectory:
    """``<root>/arbi-<pid>-<random>``, mode 0700, with a marker file that is locked as long as the process lives.

    The root is created with mode 0700 if it is missing. Directories that dead processes left in it are removed. All
    names are resolved against open directories, so a path that is swapped later leads nowhere.

    Args:
        root: the operator's directory.

    Raises:
        ConfigError: naming ``cache.disk_tier_dir``: the root is not a directory, belongs to another user, may be
            written by group or others, or cannot be written.
    """

    def __init__(self, root: Path) -> None:
        with contextlib.ExitStack() as undo:
            self._root_fd = open_own_directory(root, _SETTING)
            undo.callback(os.close, self._root_fd)
            _remove_leftovers(self._root_fd, root)
            self.path = root / f"arbi-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                os.mkdir(self.path.name, 0o700, dir_fd=self._root_fd)
                self.fd = os.open(self.path.name, _DIRECTORY_FLAGS, dir_fd=self._root_fd)
                undo.callback(os.close, self.fd)
                undo.callback(_try_to_remove, self._root_fd, self.path, self.fd)
                self._marker_fd = _make_marker(self.fd)
            except OSError as error:
                raise ConfigError(
                    _SETTING, f"{str(root)!r} is not writable: {error.strerror}", "name one on a disk that is"
                ) from error
            undo.pop_all()
        self._closed = False

    def unlink(self, name: str) -> None:
        """Removes a file; one that is already gone is fine.

        Raises:
            OSError: the file cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Removes the directory with all files. Idempotent. What cannot be removed is left, with a warning."""
        if self._closed:
            return
        self._closed = True
        _try_to_remove(self._root_fd, self.path, self.fd)
        for fd in (self._marker_fd, self.fd, self._root_fd):
            os.close(fd)


def open_own_directory(root: Path, setting: str) -> int:
    """Opens the operator's directory, made if missing, after checking that nobody else can plant anything in it.

    Args:
        root: the directory.
        setting: what names it, for errors.

    Raises:
        ConfigError: it is no directory, belongs to another user, may be written by group or others, or not by us.
    """
    own = "name a directory of your own with mode 0700, or one that does not exist yet"
    try:
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(setting, f"{str(root)!r} is not a directory", own) from error
    except OSError as error:
        raise ConfigError(setting, f"{str(root)!r} cannot be used: {error.strerror}", own) from error
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = f"belongs to uid {status.st_uid}, not to uid {os.geteuid()} that runs the server"
    elif mode & 0o022:
        problem = f"may be written by group or others (mode {mode:04o})"
    elif mode & 0o300 != 0o300:  # root would be let in all the same, against what the mode says
        problem = f"is not writable (mode {mode:04o})"
    if problem:
        os.close(fd)
        raise ConfigError(setting, f"{str(root)!r} {problem}", own)
    return fd


def _make_marker(dir_fd: int) -> int:
    """Makes the marker and locks it before it gets its name: whoever sees a marker can trust its lock."""
    fd = os.open(_NEW_MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(_NEW_MARKER, _MARKER, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_leftovers(root_fd: int, root: Path) -> None:
    for name in os.listdir(root_fd):
        match = _NAME.fullmatch(name)
        # In a container every server may have the same pid: one like ours is left to the lock to judge.
        if match is None or (int(match[1]) != os.getpid() and _alive(int(match[1]))):
            continue
        try:
            removed = _remove_if_abandoned(root_fd, name)
        except OSError as error:
            log.warning("cannot remove %s, which a dead process left: %s", root / name, error)
        else:
            if removed:
                log.info("removed %s, which a dead process left", root / name)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _remove_if_abandoned(root_fd: int, name: str) -> bool:
    """Removes a directory if it is really one of ours and no process holds its marker."""
    with contextlib.ExitStack() as cleanup:
        try:
            dir_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=root_fd)
            cleanup.callback(os.close, dir_fd)
            marker_fd = os.open(_MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
            cleanup.callback(os.close, marker_fd)
        except OSError:
            return False  # a link, a file, without a marker, or another process was faster: not ours to touch
        status = os.fstat(marker_fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        try:
            fcntl.flock(marker_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # alive: a pid of another container's numbering
        _remove(root_fd, name, dir_fd)
        return True


def _try_to_remove(root_fd: int, path: Path, dir_fd: int) -> None:
    try:
        _remove(root_fd, path.name, dir_fd)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)


def _remove(root_fd: int, name: str, dir_fd: int) -> None:
    """Removes our own files, then the directory; one that holds anything else keeps its marker and stays."""
    foreign = []
    for entry in os.listdir(dir_fd):
        if _FILE.fullmatch(entry):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=dir_fd)
        elif entry not in (_MARKER, _NEW_MARKER):
            foreign.append(entry)
    if foreign:
        raise OSError(f"it holds files that are not ours: {', '.join(sorted(foreign)[:3])}")
    for entry in (_NEW_MARKER, _MARKER):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry, dir_fd=dir_fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=root_fd)
