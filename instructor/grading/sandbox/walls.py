"""The walls around a student's process, raised in the process itself before the first line of a submission runs.

| wall | what it keeps out | how |
|---|---|---|
| network | any connection | a network namespace of its own, without interfaces |
| files | the gradebook, other submissions, hidden tests, home folders | a mount namespace: a root of read-only binds |
| processes | signals to others, survivors | a process namespace: its first process takes all with it |
| privileges | setuid programs, capabilities | another user, no capabilities, no_new_privs |
| system calls | mounts, tracing, new namespaces, kernel modules | a seccomp filter |
| memory, processes, CPU time, file size | one submission using up the machine | resource limits |

What the machine does not allow is not hidden: `raise_walls` returns what stands, and by what.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
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

    def as_dict(self) -> dict:
        return asdict(self)


class WallError(OSError):
    """One wall could not be raised."""


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise WallError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encode = lambda text: text.encode() if text is not None else None  # noqa: E731
    _checked(_LIBC.mount(encode(source), encode(target), encode(kind), flags, encode(options)), f"mount {target}")


def enter_namespaces(walls: dict[str, str]) -> bool:
    """New namespaces for this process and, for process numbers, its children; true if mounts may be made."""
    user, group = os.getuid(), os.getgid()
    if user != 0:
        try:
            _checked(_LIBC.unshare(_NEWUSER), "unshare user")
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
            _checked(_LIBC.unshare(flags), f"unshare {wall}")
            walls[wall] = "namespace"
            allowed |= wall == "files"
        except OSError as error:
            walls[wall] = f"none ({error.strerror})"
    return allowed


def _bind(source: str, root: str, *, devices: bool = False) -> None:
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if not devices:
        _make_read_only(source, target)


def _make_read_only(source: str, target: str) -> None:
    """The mount and all that is mounted below it."""
    attributes = struct.pack("<4Q", 1 | 2 | 4, 0, 0, 0)  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
    number = _number("mount_setattr")
    if _LIBC.syscall(number, -100, target.encode(), 0x8000, attributes, len(attributes)) == 0:  # AT_RECURSIVE
        return
    # Before Linux 5.12: the mount alone, without what is mounted below it.
    _checked(_LIBC.umount2(target.encode(), 2), f"umount {target}")
    _mount(source, target, None, _MS_BIND)
    _mount(source, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _uncovering_folder(needed: list[str]) -> str:
    """A folder that can be mounted over without hiding any of the paths that are needed."""
    for folder in ("/tmp", "/mnt", "/media", "/srv", "/opt", "/home", "/var"):
        if os.path.isdir(folder) and not any(path == folder or path.startswith(folder + "/") for path in needed):
            return folder
    raise WallError("no folder is free to build a root in: the environment lies under each of /tmp, /mnt and /srv")


def build_root(
    visible: list[str], course: dict[str, str], hidden: list[str], limits: Limits, walls: dict[str, str]
) -> None:
    """A root folder with only what a submission may see, read-only but for its scratch folder; enter it.

    Args:
        visible: folders and files that keep their place
        course: what the students have beside their notebook: name in the scratch folder -> path
        hidden: folders that are covered with an empty one where a visible folder contains them
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    root = _uncovering_folder([*visible, *course.values(), os.getcwd()])
    _mount("root", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4m,mode=755")
    # Before the rest: what is visible may lie under /tmp.
    for folder, size in ((SCRATCH, limits.scratch_mb), ("/tmp", limits.scratch_mb), ("/out", limits.output_mb)):
        os.makedirs(root + folder, exist_ok=True)
        options = f"size={size}m,nr_inodes=20000,mode=1777"
        _mount("scratch", root + folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    bound: list[str] = []
    for path in dict.fromkeys(sorted(visible, key=len)):
        if os.path.islink(path) and path.count("/") == 1:  # /bin -> usr/bin
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path) and not any(path == b or path.startswith(b + "/") for b in bound):
            _bind(path, root)
            bound.append(path)
    for path in hidden:
        if os.path.isdir(root + path):
            _mount("hidden", root + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    os.makedirs(f"{root}/dev/shm")
    _mount("shm", f"{root}/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=256m,mode=1777")
    nvidia = [n for n in os.listdir("/dev") if n.startswith("nvidia")] if limits.gpu else []
    for name in (*DEVICES, *nvidia):
        if os.path.exists(f"/dev/{name}"):
            _bind(f"/dev/{name}", root, devices=True)
    for name, path in course.items():
        target = f"{root}{SCRATCH}/{name}"
        if os.path.isdir(path):
            os.makedirs(target)
        else:
            with open(target, "a"):
                pass
        _mount(path, target, None, _MS_BIND | _MS_REC)
        _make_read_only(path, target)
    os.makedirs(f"{root}/proc", exist_ok=True)
    os.makedirs(f"{root}/old")
    os.chdir(root)
    _checked(_LIBC.syscall(_number("pivot_root"), b".", b"old"), "pivot_root")
    os.chdir("/")
    walls["files"] = "own root, read-only but for the scratch folder"


def finish_root() -> None:
    """In the first process of the namespace: its own /proc, nothing left of the old root, and a read-only one."""
    # A new /proc may only be mounted while another one is in view; so the old root goes afterwards.
    with contextlib.suppress(WallError):
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _checked(_LIBC.umount2(b"/old", 2), "umount /old")  # MNT_DETACH
    os.rmdir("/old")
    _mount("root", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def drop_privileges(walls: dict[str, str], user: int) -> None:
    """Become nobody in particular, without capabilities, for good."""
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
        _checked(_LIBC.syscall(_number("capset"), header, data), "capset")
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def limit_resources(limits: Limits, walls: dict[str, str]) -> None:
    """Memory, processes, CPU time and file size; no core files."""
    with open("/proc/self/statm") as statm:
        size_now = int(statm.read().split()[0]) * resource.getpagesize()
    wanted = {
        "NPROC": limits.processes,
        "CPU": limits.cpu_seconds,
        "FSIZE": limits.file_mb << 20,
        "CORE": 0,
        "NOFILE": 1024,
        "AS": None if limits.gpu else size_now + int(limits.memory_gb * 1e9),
    }
    for name, value in wanted.items():
        if value is not None:
            kind = getattr(resource, f"RLIMIT_{name}")
            _, most = resource.getrlimit(kind)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (value, value))
    walls["memory"] = "none (GPU)" if limits.gpu else f"address space + {limits.memory_gb:g} GB"
    walls["limits"] = f"{limits.processes} processes, {limits.cpu_seconds} s of CPU, files of {limits.file_mb} MB"
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go when the machine runs out of memory


# ---- seccomp -----------------------------------------------------------------------------------------------------

_NUMBERS = {  # x86_64, aarch64
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "reboot": (169, 142),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "swapon": (167, 224),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "io_uring_setup": (425, 425),
    "socket": (41, 198),
    "pidfd_getfd": (438, 438),
}
_KERNEL_ONLY = ("pivot_root", "capset", "socket")  # used here, or treated apart
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _number(name: str) -> int:
    return _NUMBERS[name][_ARCHITECTURES[platform.machine()][0]]


def filter_calls(walls: dict[str, str], network: bool) -> None:
    """Refuse system calls that no lab needs; without a network namespace, internet sockets too."""
    if platform.machine() not in _ARCHITECTURES:
        walls["system calls"] = f"none ({platform.machine()} is not known)"
        return
    column, architecture = _ARCHITECTURES[platform.machine()]
    refused = [numbers[column] for name, numbers in _NUMBERS.items() if name not in _KERNEL_ONLY]
    load, jump_equal, give_back = 0x20, 0x15, 0x06
    refuse, allow = 0x00050000 | 1, 0x7FFF0000  # EPERM
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (give_back, 0, 0, 0x80000000), (load, 0, 0, 0)]
    for number in refused:
        program += [(jump_equal, 0, 1, number), (give_back, 0, 0, refuse)]
    if not network:
        program += [
            (jump_equal, 0, 3, _number("socket")),
            (load, 0, 0, 16),
            (jump_equal, 1, 0, 1),
            (give_back, 0, 0, refuse),
        ]
    program.append((give_back, 0, 0, allow))
    code = b"".join(struct.pack("<HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer)), 16)
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0:
        walls["system calls"] = "seccomp"
        if not network and not walls.get("network", "").startswith("namespace"):
            walls["network"] = "seccomp: no internet sockets"
    else:
        walls["system calls"] = f"none ({os.strerror(ctypes.get_errno())})"


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def visible_paths() -> list[str]:
    """What Python and the libraries need, wherever they are installed."""
    paths = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.realpath(sys.prefix)]
    paths.append(str(Path(os.path.realpath(sys.executable)).parent.parent))
    paths += [p for p in sys.path if (p and os.path.isabs(p) and "site-packages" in p) or "dist-packages" in p]
    if os.path.isdir("/sys/devices/system/cpu"):
        paths.append("/sys/devices/system/cpu")
    return [p for p in paths if os.path.exists(p) and p not in ("/", "/home", "/root")]
