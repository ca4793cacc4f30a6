"""Blob files: what they refuse, what they leave behind, and that damage never reads as bytes."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from arbi_core.errors import ConfigError
from arbi_core.runner.blob_files import BlobError, BlobFiles

MODES = pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
PAYLOAD = bytes(range(256)) * 3


@pytest.fixture
def root(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def make(root):
    made = []

    def make(**kwargs) -> BlobFiles:
        made.append(BlobFiles(root, **kwargs))
        return made[-1]

    yield make
    for files in made:
        files.close()


def read(files, blob) -> bytes:
    out = bytearray(blob.nbytes)
    files.read(blob, memoryview(out))
    return bytes(out)


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def leftover(root: Path, pid: int, *, marker: bool = True, random: str = "0" * 16) -> Path:
    path = root / f"arbi-{pid}-{random}"
    path.mkdir(mode=0o700, parents=True)
    (path / f"{1:016x}.blob").write_bytes(b"x")
    (path / f"{2:016x}.part").write_bytes(b"x")
    if marker:
        (path / "arbi-disk-tier").touch()
    return path


@MODES
@pytest.mark.parametrize("nbytes", [0, 1, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_payload_comes_back(make, encrypt, nbytes):
    files, payload = make(encrypt=encrypt), os.urandom(nbytes)
    blob = files.write(-7, memoryview(payload))
    assert (blob.handle, blob.nbytes) == (-7, nbytes)
    assert read(files, blob) == payload


@MODES
def test_files_and_directories_are_private(make, root, encrypt):
    old = os.umask(0)
    try:
        files = make(encrypt=encrypt)
        blob = files.write(1, memoryview(PAYLOAD))
    finally:
        os.umask(old)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(files.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in files.path.iterdir()} == {0o600}
    assert {p.name for p in files.path.iterdir()} == {blob.name, "arbi-disk-tier"}


def test_plaintext_is_not_on_disk_when_encrypted(make):
    secret = b"the quick brown fox" * 100
    assert secret[:19] not in (f := make(encrypt=True)).path.joinpath(f.write(1, memoryview(secret)).name).read_bytes()
    assert secret in (f := make()).path.joinpath(f.write(1, memoryview(secret)).name).read_bytes()


def test_same_bytes_never_encrypt_alike(make):
    files = make(encrypt=True, key=b"k" * 32)
    first, second = (files.write(1, memoryview(PAYLOAD)) for _ in range(2))
    assert (files.path / first.name).read_bytes()[20:] != (files.path / second.name).read_bytes()[20:]


@MODES
def test_every_damaged_byte_is_noticed(make, encrypt):
    files = make(encrypt=encrypt)
    blob = files.write(5, memoryview(PAYLOAD))
    path = files.path / blob.name
    intact = path.read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(BlobError, match="damaged header|do not match"):
            read(files, blob)
    path.write_bytes(intact)
    assert read(files, blob) == PAYLOAD


@MODES
@pytest.mark.parametrize("change", [-1, -17, 1, -(10**6)], ids=["short", "no-tag", "long", "empty"])
def test_a_file_of_another_size_is_refused(make, encrypt, change):
    files = make(encrypt=encrypt)
    blob = files.write(5, memoryview(PAYLOAD))
    path = files.path / blob.name
    size = max(0, path.stat().st_size + change)
    os.truncate(path, size)
    with pytest.raises(BlobError, match=f"has {size} bytes instead of"):
        read(files, blob)


@MODES
def test_a_file_put_in_anothers_place_is_refused(make, encrypt):
    files = make(encrypt=encrypt)
    one, two = files.write(1, memoryview(b"a" * 64)), files.write(2, memoryview(b"b" * 64))
    shutil.copy(files.path / one.name, files.path / two.name)
    with pytest.raises(BlobError, match="do not match"):
        read(files, two)


@MODES
def test_a_file_of_another_process_is_refused(make, encrypt):
    key = {"key": b"k" * 32} if encrypt else {}
    ours, theirs = make(encrypt=encrypt, **key), make(encrypt=encrypt, **key)
    blob, other = ours.write(1, memoryview(PAYLOAD)), theirs.write(1, memoryview(PAYLOAD))
    shutil.copy(theirs.path / other.name, ours.path / blob.name)
    with pytest.raises(BlobError, match="do not match"):
        read(ours, blob)


def test_links_and_other_kinds_of_files_are_not_followed(make, tmp_path):
    files = make()
    blob = files.write(1, memoryview(PAYLOAD))
    path = files.path / blob.name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        read(files, blob)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BlobError, match="not a regular file"):
        read(files, blob)


def test_writing_does_not_follow_a_planted_link(make, tmp_path):
    files = make()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (files.path / f"{1:016x}.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write(1, memoryview(PAYLOAD))
    assert victim.read_bytes() == b"precious"


def test_a_missing_file_cannot_be_read_but_may_be_removed(make):
    files = make()
    blob = files.write(1, memoryview(PAYLOAD))
    files.remove(blob)
    files.remove(blob)
    with pytest.raises(FileNotFoundError):
        read(files, blob)


def test_a_buffer_of_another_size_is_a_mistake_of_the_caller(make):
    files = make()
    blob = files.write(1, memoryview(PAYLOAD))
    with pytest.raises(ValueError, match="768 bytes read into 769"):
        files.read(blob, memoryview(bytearray(769)))


@MODES
def test_disk_full_leaves_no_file(make, monkeypatch, encrypt):
    files, real, room = make(encrypt=encrypt), os.write, [300]

    def write(fd, data):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(fd, data[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        files.write(1, memoryview(PAYLOAD))
    assert [p.name for p in files.path.iterdir()] == ["arbi-disk-tier"]


def test_short_writes_are_continued(make, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    files = make()
    assert read(files, files.write(1, memoryview(PAYLOAD))) == PAYLOAD


@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (lambda p: p.write_bytes(b""), "is not a directory"),
        (lambda p: p.mkdir(mode=0o700) or p.chmod(0o770), "may be written by group or others"),
        (lambda p: p.mkdir(mode=0o700) or p.chmod(0o1777), "may be written by group or others"),
        (lambda p: p.mkdir(mode=0o700) or p.chmod(0o500), "is not writable"),
        (lambda p: p.symlink_to(p.parent / "nowhere"), "is not a directory"),
    ],
    ids=["file", "group", "sticky", "read-only", "dangling"],
)
def test_unsafe_directory_is_refused(make, root, prepare, problem):
    prepare(root)
    with pytest.raises(ConfigError, match=problem) as info:
        make()
    assert info.value.field == "cache.disk_tier_dir"
    assert str(root) in str(info.value)


def test_directory_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a directory"):
        BlobFiles(tmp_path / "file" / "tier")


def test_directory_of_another_user_is_refused(make, root, monkeypatch):
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to uid"):
        make()


def test_refusal_leaves_nothing_open_and_nothing_behind(make, root, monkeypatch):
    root.mkdir(mode=0o700)
    before = len(list(Path("/proc/self/fd").iterdir()))

    def flock(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="No locks available"):
        make()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(root.iterdir()) == []


def test_encryption_without_its_package_says_what_to_install(make, root, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install 'arbi-core\[crypto\]'") as info:
        make(encrypt=True)
    assert info.value.field == "cache.disk_tier_encrypt"
    assert not root.exists()


@pytest.mark.parametrize("options", [{"encrypt": True, "key": b"short"}, {"key": b"k" * 32}], ids=["short", "unused"])
def test_wrong_key_is_refused(make, options):
    with pytest.raises(ConfigError, match="key"):
        make(**options)


def test_close_removes_everything_and_may_be_repeated(make, root):
    files = make()
    files.write(1, memoryview(PAYLOAD))
    files.close()
    files.close()
    assert list(root.iterdir()) == []


def test_close_leaves_what_is_not_ours(make, root, caplog):
    files = make()
    blob = files.write(1, memoryview(PAYLOAD))
    (files.path / "notes.txt").write_text("mine")
    files.close()
    assert "notes.txt" in caplog.text
    assert (files.path / "notes.txt").exists()
    assert not (files.path / blob.name).exists()


def test_leftovers_of_a_dead_process_are_removed(make, root):
    root.mkdir(mode=0o700)
    gone = leftover(root, dead_pid())
    files = make()
    assert not gone.exists()
    assert list(root.iterdir()) == [files.path]


def test_leftovers_of_a_killed_process_are_removed(make, root):
    code = (
        "import os; from arbi_core.runner.blob_files import BlobFiles\n"
        f"BlobFiles({str(root)!r}).write(1, memoryview(b'abc')); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (gone,) = root.iterdir()
    assert len(list(gone.iterdir())) == 2
    files = make()
    assert list(root.iterdir()) == [files.path]


def test_leftovers_of_an_earlier_server_with_our_pid_are_removed(make, root):
    root.mkdir(mode=0o700)
    gone = leftover(root, os.getpid())
    make()
    assert not gone.exists()


def test_directories_in_use_are_left_alone(make, root):
    first = make()
    blob = first.write(1, memoryview(PAYLOAD))
    # Another container's numbering: its pid means nobody here, its lock is held.
    renamed = root / f"arbi-{dead_pid()}-{'1' * 16}"
    first.path.rename(renamed)
    make()
    assert read(first, blob) == PAYLOAD
    renamed.rename(first.path)


@pytest.mark.parametrize("kind", ["alive", "no-marker", "other-name", "link", "linked-marker"])
def test_what_is_not_surely_abandoned_is_left_alone(make, root, tmp_path, kind):
    root.mkdir(mode=0o700)
    pid = os.getppid() if kind == "alive" else dead_pid()
    path = leftover(root, pid, marker=kind not in ("no-marker", "linked-marker"))
    if kind == "other-name":
        path = path.rename(root / f"{path.name}-backup")
    elif kind == "link":
        path.rename(tmp_path / "real")
        path.symlink_to(tmp_path / "real")
    elif kind == "linked-marker":
        (tmp_path / "marker").touch()
        (path / "arbi-disk-tier").symlink_to(tmp_path / "marker")
    make()
    assert (path / f"{1:016x}.blob").exists()
