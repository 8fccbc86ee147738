"""The walls around a student's process, raised in it before the first line of a submission runs; docs/grading.md lists them.

What the machine does not allow is not hidden: each function here notes in `walls` what a wall stands by, or "none" and
why. `submission.enclosure.Enclosure.raise_walls` calls them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from utils.files import ROOT

_LIBC = ctypes.CDLL(None, use_errno=True)
# CLONE_NEW* of <linux/sched.h>: bits 17 and 26 to 30
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MS_REMOUNT = 1, 2, 4, 4096, 16384, 1 << 18, 32
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_DUMPABLE, _PR_SET_PDEATHSIG = 38, 22, 24, 4, 1

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt/nvidia")  # read-only inside
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SCRATCH = "/scratch"  # where a submission runs


@dataclass(frozen=True)
class Limits:
    """What one submission may use."""

    memory_gb: float = 6.0  # address space above what the warm process has, each process
    processes: int = 64
    cpu_seconds: int = 3600  # each process
    file_mb: int = 256  # the largest file
    scratch_mb: int = 512  # all files together
    output_mb: int = 8  # written to file descriptors 1 and 2
    gpu: bool = False  # leave the GPUs in view, and the address space unlimited (CUDA reserves terabytes)
    device: str = ""  # CUDA_VISIBLE_DEVICES of all its processes; "" takes the grader's


def _expect_zero(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    system = kind.encode() if kind is not None else None
    result = _LIBC.mount(source.encode(), target.encode(), system, flags, options.encode())
    _expect_zero(result, f"mount {target}")


def enter_namespaces(walls: dict[str, str]) -> bool:
    """Enter new namespaces; that of processes begins with the next child. Returns True if mounts may be made."""
    user, group = os.getuid(), os.getgid()
    if user != 0:
        try:
            _expect_zero(_LIBC.unshare(_NEWUSER), "unshare user")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
            walls["privileges"] = "user namespace"
        except OSError as error:
            walls["privileges"] = f"none ({error.strerror})"
            for wall in ("network", "files", "processes"):
                walls[wall] = "none (no user namespaces, and not root)"
            return False
    allowed = False
    for wall, flags in (("network", _NEWNET), ("files", _NEWNS), ("processes", _NEWPID | _NEWIPC | _NEWUTS)):
        try:
            _expect_zero(_LIBC.unshare(flags), f"unshare {wall}")
            walls[wall] = "namespace"
            allowed |= wall == "files"
        except OSError as error:
            walls[wall] = f"none ({error.strerror})"
    return allowed


def _bind(source: str, target: str, *, devices: bool = False) -> None:
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        Path(target).touch()
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if not devices:
        _make_read_only(target)


def _make_read_only(target: str) -> None:
    """Make a mount, and all mounts below it, read-only; Linux can since 5.12."""
    attributes = struct.pack("<4Q", 1 | 2 | 4, 0, 0, 0)  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
    # 0x8000: AT_RECURSIVE
    result = _LIBC.syscall(_number("mount_setattr"), -100, target.encode(), 0x8000, attributes, len(attributes))
    _expect_zero(result, f"mount_setattr {target}")


def build_root(root: str, limits: Limits, walls: dict[str, str]) -> None:
    """Make a root in an empty folder with only what a submission may see, read-only but for its scratch folder, and enter it."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    assets = str(ROOT / "assets")  # also in the scratch folder, where students have it
    visible = [*visible_paths(), str(ROOT / "utils"), assets]
    _mount("root", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4m,mode=755")
    # First, since a visible path may be below /tmp.
    for folder, size in ((SCRATCH, limits.scratch_mb), ("/tmp", limits.scratch_mb), ("/out", limits.output_mb)):
        os.makedirs(root + folder, exist_ok=True)
        options = f"size={size}m,nr_inodes=20000,mode=1777"
        _mount("scratch", root + folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    bound: list[str] = []
    for path in dict.fromkeys(sorted(visible, key=len)):
        if os.path.islink(path) and path.count("/") == 1:  # /bin -> usr/bin
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path) and not any(path == b or path.startswith(b + "/") for b in bound):
            _bind(path, root + path)
            bound.append(path)
    for path in hidden_paths():
        if os.path.isdir(root + path):
            _mount("hidden", root + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    os.makedirs(f"{root}/dev/shm")
    _mount("shm", f"{root}/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=256m,mode=1777")
    nvidia = [n for n in os.listdir("/dev") if n.startswith("nvidia")] if limits.gpu else []
    for name in (*DEVICES, *nvidia):
        if os.path.exists(f"/dev/{name}"):
            _bind(f"/dev/{name}", f"{root}/dev/{name}", devices=True)
    _bind(assets, f"{root}{SCRATCH}/assets")
    os.makedirs(f"{root}/proc", exist_ok=True)
    os.makedirs(f"{root}/old")
    os.chdir(root)
    _expect_zero(_LIBC.syscall(_number("pivot_root"), b".", b"old"), "pivot_root")
    os.chdir("/")
    walls["files"] = "own root, read-only but for the scratch folder"


def finish_root() -> None:
    """Mount the namespace's own /proc, drop the old root, and make the new one read-only.

    This has to run in the first process of the namespace.
    """
    # The kernel allows a new /proc only while another one is visible; so the old root is dropped afterwards.
    with contextlib.suppress(OSError):
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _expect_zero(_LIBC.umount2(b"/old", 2), "umount /old")  # MNT_DETACH
    os.rmdir("/old")
    _mount("root", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def drop_privileges(walls: dict[str, str], user: int) -> None:
    """Become another user, without capabilities, for good."""
    if os.getuid() == 0 and walls.get("privileges") != "user namespace":
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            walls["privileges"] = "another user"
        except OSError as error:
            walls["privileges"] = f"none ({error.strerror})"
    elif walls.get("privileges") == "user namespace":
        for capability in range(64):
            _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        header, data = struct.pack("<II", 0x20080522, 0), struct.pack("<6I", *[0] * 6)
        _expect_zero(_LIBC.syscall(_number("capset"), header, data), "capset")
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _expect_zero(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def address_space() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_resources(limits: Limits, walls: dict[str, str]) -> None:
    """Limit memory, processes, CPU time and file size; allow no core files."""
    values = {
        "NPROC": limits.processes,
        "CPU": limits.cpu_seconds,
        "FSIZE": limits.file_mb << 20,
        "CORE": 0,
        "NOFILE": 1024,
        "AS": None if limits.gpu else address_space() + int(limits.memory_gb * 1e9),
    }
    for name, value in values.items():
        if value is not None:
            kind = getattr(resource, f"RLIMIT_{name}")
            _, highest = resource.getrlimit(kind)
            value = value if highest == resource.RLIM_INFINITY else min(value, highest)
            resource.setrlimit(kind, (value, value))
    walls["memory"] = "none (GPU)" if limits.gpu else f"address space + {limits.memory_gb:g} GB"
    walls["limits"] = f"{limits.processes} processes, {limits.cpu_seconds} s of CPU, files of {limits.file_mb} MB"
    first_to_go()


def limit_memory(gigabytes: float) -> None:
    """Limit the address space of this process to what it has now and so many GB."""
    most = address_space() + int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def first_to_go() -> None:
    """Have the kernel end this process, and what it starts, before others when the machine runs out of memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


# ---- seccomp -----------------------------------------------------------------------------------------------------

# {name: (number on x86_64, on aarch64)}
# fmt: off
_NUMBERS = {
    # needed here, or filtered by their arguments
    "pivot_root": (155, 41), "capset": (126, 91), "socket": (41, 198), "clone": (56, 220), "clone3": (435, 435),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "mount_setattr": (442, 442),
    # other processes and their memory
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # the kernel
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "reboot": (169, 142),
    "swapon": (167, 224), "io_uring_setup": (425, 425),
    # memory that no limit of a process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
}
# fmt: on
_NOT_REFUSED = ("pivot_root", "capset", "socket", "clone", "clone3")
_NEW_NAMESPACES = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET | 1 << 25  # 25: CLONE_NEWCGROUP
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _number(name: str) -> int:
    return _NUMBERS[name][_ARCHITECTURES[platform.machine()][0]]


def filter_calls(walls: dict[str, str], gpu: bool = False) -> None:
    """Refuse system calls that no lab needs, and internet sockets, which a network namespace only leaves useless.

    With `gpu` memory without a name is allowed, since CUDA's driver asks for it.
    """
    if platform.machine() not in _ARCHITECTURES:
        walls["system calls"] = f"none ({platform.machine()} is not known)"
        return
    column, architecture = _ARCHITECTURES[platform.machine()]
    left_out = (*_NOT_REFUSED, "memfd_create") if gpu else _NOT_REFUSED
    refused = [numbers[column] for name, numbers in _NUMBERS.items() if name not in left_out]
    load, jump_equal, jump_if_any, finish = 0x20, 0x15, 0x45, 0x06
    refuse, allow = 0x00050000 | 1, 0x7FFF0000  # EPERM
    unknown = 0x00050000 | 38  # ENOSYS: the C library then takes clone, whose flags can be looked at
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (finish, 0, 0, 0x80000000), (load, 0, 0, 0)]
    for number in refused:
        program += [(jump_equal, 0, 1, number), (finish, 0, 0, refuse)]
    # The first argument of socket() is at offset 16; family 1 is AF_UNIX, which stays allowed.
    program += [(jump_equal, 0, 3, _number("socket")), (load, 0, 0, 16), (jump_equal, 1, 0, 1), (finish, 0, 0, refuse)]
    program += [(load, 0, 0, 0), (jump_equal, 0, 1, _number("clone3")), (finish, 0, 0, unknown)]
    program += [(jump_equal, 0, 3, _number("clone")), (load, 0, 0, 16), (jump_if_any, 0, 1, _NEW_NAMESPACES)]
    program += [(finish, 0, 0, refuse), (finish, 0, 0, allow)]
    code = b"".join(struct.pack("<HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer)), 16)
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0:
        walls["system calls"] = "seccomp"
        if not walls.get("network", "").startswith("namespace"):
            walls["network"] = "seccomp: no internet sockets"
    else:
        walls["system calls"] = f"none ({os.strerror(ctypes.get_errno())})"


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def visible_paths() -> list[str]:
    """The paths that Python and the libraries need, wherever they are installed."""
    paths = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.realpath(sys.prefix)]
    paths.append(str(Path(os.path.realpath(sys.executable)).parent.parent))
    paths += [p for p in sys.path if (p and os.path.isabs(p) and "site-packages" in p) or "dist-packages" in p]
    if os.path.isdir("/sys/devices/system/cpu"):
        paths.append("/sys/devices/system/cpu")
    return [p for p in paths if os.path.exists(p) and p not in ("/", "/home", "/root")]


def hidden_paths() -> list[str]:
    """Paths that an empty folder covers where a visible one contains them.

    These are the instructor's files, and each copy of them that is installed next to the libraries.
    """
    paths = [ROOT / name for name in ("instructor", "tests", "build", "submitted")]
    libraries = [Path(entry) for entry in sys.path if entry]
    for prefix in map(Path, dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/usr/local"))):
        libraries += [*prefix.glob("lib*/python3*/site-packages"), *prefix.glob("lib/python3*/dist-packages")]
    paths += [folder / "instructor" for folder in libraries if (folder / "instructor").is_dir()]
    return list(dict.fromkeys(name for path in paths for name in (str(path), os.path.realpath(path))))
