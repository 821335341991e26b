"""Small secret files: read with bounds, written so that none is ever half there. Knows nothing of certificates."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from titan.common.errors import CertificateInvalid, CertificateMissing, SecurityError

MAX_FILE_BYTES = 256 * 1024
PRIVATE, PUBLIC = 0o600, 0o644


class NewFile(NamedTuple):
    path: Path
    content: bytes
    mode: int


def read_bounded(path: Path, *, mend: str, private: bool = False) -> bytes:
    """The bytes of a plain file of at most 256 KiB.

    Raises:
        CertificateMissing: no such file; `mend` says which command makes it.
        CertificateInvalid: not a plain file, too large, unreadable, or `private` and open to other users.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not wait for its writer
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CertificateInvalid(f"{path} is not a plain file", mend)
            if private and status.st_mode & 0o077:
                raise CertificateInvalid(f"the private key {path} is open to other users", f"Run `chmod 600 {path}`")
            content = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CertificateMissing(f"{path} does not exist", mend) from error
    except IsADirectoryError as error:
        raise CertificateInvalid(f"{path} is a folder, not a file", mend) from error
    except OSError as error:
        raise CertificateInvalid(f"{path} cannot be read ({error.strerror})", "Check its owner and mode") from error
    if len(content) > MAX_FILE_BYTES:
        raise CertificateInvalid(f"{path} is larger than 256 KiB", "Check that this is the file you mean")
    return content


def write_together(files: Sequence[NewFile]) -> None:
    """Write all files or none: each is complete on disk before the first takes its name, and a failure undoes the rest.

    A file has its mode from the moment it exists. All must lie in one folder. (Only a power cut between two renames can
    part them; a key that does not match its certificate is then refused by `load_credentials`.)

    Raises:
        SecurityError: the folder cannot be written, or the disk is full; what was there before is there still.
    """
    tag = secrets.token_hex(6)
    folder = files[0].path.parent
    fresh = [_hidden(f.path, f"{tag}.new") for f in files]
    old = [_hidden(f.path, f"{tag}.old") for f in files]
    placed: list[int] = []
    try:
        try:
            for file, temporary in zip(files, fresh, strict=True):
                _write_new(temporary, file.content, file.mode)
            for file, backup in zip(files, old, strict=True):
                with contextlib.suppress(FileNotFoundError):
                    os.link(file.path, backup)
            for index, (file, temporary) in enumerate(zip(files, fresh, strict=True)):
                os.replace(temporary, file.path)
                placed.append(index)
            _sync_folder(folder)
        except BaseException:
            for index in placed:
                _restore(files[index].path, old[index])
            raise
        finally:
            for path in (*fresh, *old):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise SecurityError(
            f"{error.filename or folder} cannot be written ({error.strerror}); nothing was changed",
            "Check the folder's owner and the free space",
        ) from error


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make `folder` (0700) when it is not there, and keep other Titan commands out of it inside the block.

    Raises:
        SecurityError: it cannot be made or opened, or another command is at work in it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError as error:
        raise SecurityError(
            f"{folder} cannot be used as a folder ({error.strerror})", "Choose another --dir"
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SecurityError(f"another command is writing in {folder}", "Try again when it has ended") from error
        yield
    finally:
        os.close(fd)


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _write_new(path: Path, content: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        os.fchmod(fd, mode)  # the umask may have taken bits away
        file.write(content)
        file.flush()
        os.fsync(fd)


def _restore(path: Path, backup: Path) -> None:
    if backup.exists():
        os.replace(backup, path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
