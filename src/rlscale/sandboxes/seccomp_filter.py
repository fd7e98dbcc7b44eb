"""Filter of the system calls that programs in a sandbox do not need and that lead out of it or around its limits.

- mounts and namespaces: a nested namespace could mount a file system without a size limit
- other processes' memory and limits: the first process of a sandbox may have the user of its programs
- memory that no limit counts: memfd_create, System V shared memory
- sockets of families that network namespaces do not separate, e.g. AF_VSOCK, which reaches the host of a VM
- kernel interfaces with a history of holes: bpf, perf, io_uring, userfaultfd, keys
"""

import errno
import platform
import struct

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7  # AUDIT_ARCH_*
ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}

# Name -> number on x86_64, number on aarch64 (None: the architecture does not have it).
_DENIED: dict[str, tuple[int, int | None]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "modify_ldt": (154, None),
    "vmsplice": (278, 75),
    "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119),
}
_CLONE, _CLONE3, _SOCKET, _PRLIMIT = (56, 220), (435, 435), (41, 198), (302, 261)
_SETPRIORITY, _SETAFFINITY = (141, 140), (203, 122)
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag of clone
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def _error(number: int) -> int:
    return 0x00050000 | number


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _only_if(number: int, body: bytes) -> bytes:
    """`body` for the system call of this number. It may change the accumulator, so it must end with a return."""
    return _op(_EQUAL, number, 0, len(body) // 8) + body


def build_filter(machine: str | None = None) -> bytes:
    """The filter as instructions of classic BPF.

    Raises OSError on an architecture whose numbers are unknown.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}; known are {', '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    deny = _op(_RETURN, _error(errno.EPERM))
    program = _op(_LOAD, _ARCH) + _op(_EQUAL, ARCHITECTURES[machine], 1, 0) + _op(_RETURN, _KILL) + _op(_LOAD, _NR)
    if machine == "x86_64":  # the x32 ABI has other numbers for the same calls
        program += _op(_AT_LEAST, _X32, 0, 1) + deny
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            program += _only_if(number, deny)
    # The flags of clone3 are in memory, which a filter cannot read; ENOSYS makes libc call clone.
    program += _only_if(_CLONE3[column], _op(_RETURN, _error(errno.ENOSYS)))
    allow = _op(_RETURN, _ALLOW)
    first = _op(_LOAD, _ARGUMENTS)
    program += _only_if(_CLONE[column], first + _op(_ANY_BIT, _NEW_NAMESPACES, 0, 1) + deny + allow)
    families = b"".join(_op(_EQUAL, family, len(_FAMILIES) - i) for i, family in enumerate(_FAMILIES))
    program += _only_if(_SOCKET[column], first + families + deny + allow)
    # Only of the process itself (0), not of the first process of the sandbox.
    for numbers in (_PRLIMIT, _SETAFFINITY):
        program += _only_if(numbers[column], first + _op(_EQUAL, 0, 1, 0) + deny + allow)
    second = _op(_LOAD, _ARGUMENTS + 8)
    program += _only_if(_SETPRIORITY[column], second + _op(_EQUAL, 0, 1, 0) + deny + allow)
    return program + allow
