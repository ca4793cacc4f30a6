"""The disk side of a rank's host store: one file per blob in a private directory. POSIX only, torch-free.

A file is ``magic(8) version(u16) flags(u16) length(u64)``, little endian, followed by

- plain mode (flags 0): ``payload || digest(16)``, BLAKE2b keyed with bytes that only this process knows,
- encrypted mode (flags 1): ``nonce(12) || ciphertext || tag(16)``, AES-256-GCM.

Digest and tag cover the header, the blob's handle, its length and a salt of the process, so a file that was damaged,
written by somebody else, or moved over another one is refused instead of being read as the wrong bytes.

Nothing is synced: the files serve one process and mean nothing after it.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

from attrs import frozen

from arbi_core.errors import ArbiError, ConfigError
from arbi_core.runner.blob_directory import PrivateDirectory

__all__ = ["Blob", "BlobError", "BlobFiles"]

_HEADER = struct.Struct("<8sHHQ")
_MAGIC = b"ARBIBLOB"
_VERSION = 1
_BOUND = struct.Struct("<qQ")
_CHUNK = 1 << 20
"""Bytes hashed or ciphered per call: enough to be fast, small beside a blob."""


class BlobError(ArbiError):
    """A blob's file is truncated, damaged, tampered with, or not a regular file."""

    code = "blob_error"


@frozen
class Blob:
    """A blob that stands on disk.

    Attributes:
        handle: whose bytes; fits in 64 bits, signed.
        nbytes: length of the payload.
        name: of the file in the private directory; never used twice.
    """

    handle: int
    nbytes: int
    name: str


class _Protection(Protocol):
    """How payloads are guarded. `bound` is what a file is tied to beside its payload."""

    flags: ClassVar[int]
    overhead: ClassVar[int]

    def write(self, fd: int, bound: bytes, payload: memoryview) -> None: ...

    def read(self, fd: int, bound: bytes, into: memoryview) -> None: ...


class BlobFiles:
    """Writes, reads and removes blobs. Not thread-safe: one thread at a time.

    Args:
        directory: what the operator gave; see `PrivateDirectory` for what is asked of it.
        encrypt: AES-256-GCM instead of a digest; needs the package ``cryptography``.
        key: 32 bytes; by default drawn for this process and kept in memory only.

    Raises:
        ConfigError: the directory is unsafe or unusable, the key is wrong, or ``cryptography`` is missing.
    """

    def __init__(self, directory: str | Path, *, encrypt: bool = False, key: bytes | None = None) -> None:
        self._salt = os.urandom(16)
        self._protection = _protection(encrypt=encrypt, key=key)
        self._directory = PrivateDirectory(Path(directory))
        self._next = 0

    @property
    def path(self) -> Path:
        """The private directory."""
        return self._directory.path

    def write(self, handle: int, payload: memoryview) -> Blob:
        """Writes a payload to a new file, mode 0600, that appears only when it is complete.

        Args:
            handle: whose bytes; fits in 64 bits, signed.
            payload: ``(nbytes,)`` uint8, contiguous.

        Raises:
            OSError: the disk is full or cannot be written; nothing is left behind.
        """
        self._next += 1
        name, partial = f"{self._next:016x}.blob", f"{self._next:016x}.part"
        header, bound = self._header(handle, payload.nbytes)
        dir_fd = self._directory.fd
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
        try:
            try:
                _write_all(fd, memoryview(header))
                self._protection.write(fd, bound, payload)
            finally:
                os.close(fd)  # a network disk may report only here that it is full
            os.rename(partial, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            self._directory.unlink(partial)
            raise
        return Blob(handle, payload.nbytes, name)

    def read(self, blob: Blob, into: memoryview) -> None:
        """Reads a blob's payload.

        Args:
            blob: what `write` returned.
            into: ``(blob.nbytes,)`` uint8, contiguous, writable; its content is undefined after an error.

        Raises:
            BlobError: the file is not, byte for byte, the one that was written.
            OSError: the file is gone or cannot be read.
        """
        if into.nbytes != blob.nbytes:
            raise ValueError(f"blob of {blob.nbytes} bytes read into {into.nbytes}")
        # O_NONBLOCK: a FIFO put in the file's place must not block the open.
        fd = os.open(blob.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._directory.fd)
        try:
            header, bound = self._header(blob.handle, blob.nbytes)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BlobError(f"{blob.name} is not a regular file")
            expected = len(header) + blob.nbytes + self._protection.overhead
            if status.st_size != expected:
                raise BlobError(f"{blob.name} has {status.st_size} bytes instead of {expected}")
            found = bytearray(len(header))
            _read_all(fd, memoryview(found))
            if found != header:
                raise BlobError(f"{blob.name} has a damaged header")
            self._protection.read(fd, bound, into)
        finally:
            os.close(fd)

    def remove(self, blob: Blob) -> None:
        """Removes a blob's file; one that is already gone is fine.

        Raises:
            OSError: the file cannot be removed.
        """
        self._directory.unlink(blob.name)

    def close(self) -> None:
        """Removes all files and the private directory. Idempotent."""
        self._directory.close()

    def _header(self, handle: int, nbytes: int) -> tuple[bytes, bytes]:
        """The header, and everything that digest or tag cover beside the payload."""
        header = _HEADER.pack(_MAGIC, _VERSION, self._protection.flags, nbytes)
        return header, header + _BOUND.pack(handle, nbytes) + self._salt


def _protection(*, encrypt: bool, key: bytes | None) -> _Protection:
    if key is not None and not encrypt:
        raise ConfigError("cache.disk_tier_encrypt", "a key is given but encryption is off", "turn it on")
    if key is not None and len(key) != _AesGcm.key_bytes:
        raise ConfigError(
            "cache.disk_tier_encrypt", f"the key has {len(key)} bytes", f"a key has {_AesGcm.key_bytes} random bytes"
        )
    return _AesGcm(key) if encrypt else _Digest()


class _Digest:
    """``payload || keyed BLAKE2b``: readable by whoever may read the file, but not to be forged."""

    flags: ClassVar[int] = 0
    overhead: ClassVar[int] = 16

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def write(self, fd: int, bound: bytes, payload: memoryview) -> None:
        digest = self._start(bound)
        for piece in _pieces(payload):
            digest.update(piece)
            _write_all(fd, piece)
        _write_all(fd, memoryview(digest.digest()))

    def read(self, fd: int, bound: bytes, into: memoryview) -> None:
        digest = self._start(bound)
        for piece in _pieces(into):
            _read_all(fd, piece)
            digest.update(piece)
        found = bytearray(self.overhead)
        _read_all(fd, memoryview(found))
        if not hmac.compare_digest(found, digest.digest()):
            raise BlobError("the bytes do not match their digest")

    def _start(self, bound: bytes) -> hashlib.blake2b:
        return hashlib.blake2b(bound, digest_size=self.overhead, key=self._key)


class _AesGcm:
    """``nonce || ciphertext || tag``, streamed through two small buffers instead of a second copy of the blob."""

    flags: ClassVar[int] = 1
    overhead: ClassVar[int] = 12 + 16
    key_bytes: ClassVar[int] = 32

    def __init__(self, key: bytes | None) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise ConfigError(
                "cache.disk_tier_encrypt",
                "needs the package 'cryptography', which is not installed",
                "pip install 'arbi-core[crypto]'",
            ) from error
        self._invalid_tag = InvalidTag
        aes = algorithms.AES(key if key is not None else os.urandom(self.key_bytes))
        self._cipher: Callable[[bytes], Any] = lambda nonce: Cipher(aes, modes.GCM(nonce))
        self._in = memoryview(bytearray(_CHUNK))
        self._out = memoryview(bytearray(_CHUNK + 15))  # older releases ask for room for one more AES block

    def write(self, fd: int, bound: bytes, payload: memoryview) -> None:
        nonce = os.urandom(12)
        encryptor = self._cipher(nonce).encryptor()
        encryptor.authenticate_additional_data(bound)
        _write_all(fd, memoryview(nonce))
        for piece in _pieces(payload):
            _write_all(fd, self._out[: self._update(encryptor, piece)])
        encryptor.finalize()
        _write_all(fd, memoryview(encryptor.tag))

    def read(self, fd: int, bound: bytes, into: memoryview) -> None:
        nonce, tag = bytearray(12), bytearray(16)
        _read_all(fd, memoryview(nonce))
        decryptor = self._cipher(bytes(nonce)).decryptor()
        decryptor.authenticate_additional_data(bound)
        for piece in _pieces(into):
            _read_all(fd, self._in[: piece.nbytes])
            self._update(decryptor, self._in[: piece.nbytes])
            piece[:] = self._out[: piece.nbytes]
        _read_all(fd, memoryview(tag))
        try:
            decryptor.finalize_with_tag(bytes(tag))
        except self._invalid_tag:
            raise BlobError("the bytes do not match their authentication tag") from None

    def _update(self, context: Any, piece: memoryview) -> int:
        count: int = context.update_into(piece, self._out)
        if count != piece.nbytes:
            raise BlobError(f"AES-GCM returned {count} bytes for {piece.nbytes}")
        return count


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    return (buffer[start : start + _CHUNK] for start in range(0, buffer.nbytes, _CHUNK))


def _write_all(fd: int, data: memoryview) -> None:
    while data.nbytes:
        count = os.write(fd, data)
        if count == 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        data = data[count:]


def _read_all(fd: int, into: memoryview) -> None:
    while into.nbytes:
        count = os.readv(fd, [into])
        if count == 0:
            raise BlobError("the file ends too early")
        into = into[count:]
