"""Everything that differs between macOS and Linux: memory, file cache, sleep, limits. Knows nothing of experts.

Functions take the platform's name and the system calls they stand on as keyword arguments, so that each branch can be
tested on the other system.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

GIB = 1 << 30
_F_NOCACHE = 48  # <sys/fcntl.h> on macOS
_RUSAGE_INFO_V0 = 0
_MACOS_OPEN_MAX = 10_240
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_SELF = Path("/proc/self/cgroup")
EVERY_CORE = frozenset(os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1))


def total_memory_bytes() -> int:
    """Memory of this machine, or of the container when that has less."""
    limit = cgroup_memory()[0] if sys.platform == "linux" else None
    total = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def available_memory_bytes() -> int:
    """Memory that can be taken now without swapping; in a container, what its limit leaves."""
    available = psutil.virtual_memory().available
    if sys.platform == "linux":
        limit, used = cgroup_memory()
        if limit is not None:
            available = min(available, limit - used)
    return max(available, 0)


def cgroup_memory(root: Path = _CGROUP_ROOT, self_file: Path = _CGROUP_SELF) -> tuple[int | None, int]:
    """(limit, used) bytes of the tightest memory limit of cgroup v2 above this process; limit is None without one.

    `used` leaves out page cache that the kernel may drop (`inactive_file`).
    """
    try:
        entry = next(line for line in self_file.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None, 0
    group = (root / entry.removeprefix("0::").lstrip("/")).resolve()
    tightest: tuple[int | None, int] = (None, 0)
    while group.is_relative_to(root):
        limit = _read_int(group / "memory.max")
        if limit is not None:
            used = max((_read_int(group / "memory.current") or 0) - _inactive_file(group), 0)
            if tightest[0] is None or limit - used < tightest[0] - tightest[1]:
                tightest = (limit, used)
        group = group.parent
    return tightest


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _inactive_file(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) for row in lines if row.startswith("inactive_file ")), 0)


def memory_budget_bytes(
    *,
    platform: str = sys.platform,
    total: Callable[[], int] = total_memory_bytes,
    available: Callable[[], int] = available_memory_bytes,
    metal_working_set: Callable[[], int | None] | None = None,
) -> int:
    """Default for `memory:` (M_n of the formulation): bytes of experts that this node may hold.

    macOS: Metal's `max_recommended_working_set_size` (about two thirds to three quarters of the memory; beyond it the
    system compresses and swaps what the GPU uses) less a reserve for KV cache, activations and reader buffers.
    Linux: what is available now, within the container's limit, less the same reserve. The reserve is a tenth of the
    memory, at least 1 GiB but never more than a quarter.
    """
    memory = total()
    reserve = min(max(GIB, memory // 10), memory // 4)
    usable = available()
    if platform == "darwin":
        usable = (metal_working_set or _metal_working_set)() or memory * 2 // 3
    return max(min(usable, memory) - reserve, 0)


def _metal_working_set() -> int | None:
    import mlx.core as mx  # only here: the other functions must not pay for loading MLX

    size = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
    return int(size) if size else None


def process_memory_bytes(
    *, platform: str = sys.platform, rusage: Callable[[int, int, ctypes.Array], int] | None = None
) -> int:
    """Memory of this process: resident set; on macOS the footprint that Activity Monitor shows.

    The footprint counts compressed and GPU memory, which the resident set leaves out; without it, the resident set.
    """
    if platform == "darwin":
        buffer = ctypes.create_string_buffer(512)
        call = rusage or ctypes.CDLL(None).proc_pid_rusage
        if call(os.getpid(), _RUSAGE_INFO_V0, buffer) == 0:
            # struct rusage_info_v0: uuid[16], then u64 user, system, wakeups (2), pageins, wired, resident, footprint
            return int.from_bytes(buffer.raw[72:80], sys.byteorder)
    return psutil.Process().memory_info().rss


def process_peak_bytes(*, platform: str = sys.platform, status_file: Path = Path("/proc/self/status")) -> int:
    """Largest resident set this process has had. Linux: VmHWM, as `ru_maxrss` survives fork and exec."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if platform == "darwin":
        return peak
    try:
        rows = status_file.read_text().splitlines()
    except OSError:
        return peak * 1024
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM:")), peak * 1024)


def open_for_reading(path: str | os.PathLike[str], *, bypass_cache: bool, platform: str = sys.platform) -> int:
    """A descriptor for positional reads; the caller closes it.

    With `bypass_cache`, macOS keeps what is read out of its cache (F_NOCACHE); Linux is told not to read ahead, and
    `drop_cached` after a read gives the pages back.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if bypass_cache:
        try:
            if platform == "darwin":
                fcntl.fcntl(fd, _F_NOCACHE, 1)
            else:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError:
            os.close(fd)
            raise
    return fd


def drop_cached(fd: int, offset: int, nbytes: int, *, platform: str = sys.platform) -> None:
    """Give the page cache of a range that was read back to the system; macOS never filled it (F_NOCACHE)."""
    if platform != "darwin":
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def keep_awake(
    *, platform: str = sys.platform, launch: Callable[[list[str]], subprocess.Popen[bytes]] | None = None
) -> Iterator[bool]:
    """Keep the machine from sleeping inside the block; yields whether it does.

    macOS runs `caffeinate -w <this process>`, which also ends when this process dies; elsewhere nothing happens.
    """
    child: subprocess.Popen[bytes] | None = None
    if platform == "darwin":
        with contextlib.suppress(OSError):  # no caffeinate: serve anyway
            child = (launch or _launch_quietly)(["caffeinate", "-i", "-m", "-s", "-w", str(os.getpid())])
    try:
        yield child is not None
    finally:
        if child is not None:
            child.terminate()
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(timeout=5)


def _launch_quietly(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def set_nofile_limit(wanted: int = 8192) -> int:
    """Raise this process's limit of open files towards `wanted`; returns the limit that holds. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    for limit in (
        target,
        min(target, _MACOS_OPEN_MAX),
    ):  # macOS refuses more than OPEN_MAX under an infinite hard limit
        if limit <= soft:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return limit
    return soft


def place_thread(thread: int, cores: Iterable[int]) -> bool:
    """Let a thread, by its native id, run on these cores alone; False where the system or a container forbids it."""
    if sys.platform != "linux":
        return False
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:  # or it has ended
        return False
    return True


@contextlib.contextmanager
def every_core() -> Iterator[None]:
    """Threads and processes begun in the block may use every core, also when this thread is kept on one."""
    thread = threading.get_native_id()
    mine = os.sched_getaffinity(thread) if sys.platform == "linux" else EVERY_CORE
    place_thread(thread, EVERY_CORE)
    try:
        yield
    finally:
        place_thread(thread, mine)
