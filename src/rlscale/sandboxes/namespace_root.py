"""Root file system of a sandbox: system folders to read, one private folder to write, and nothing else of the machine.

/usr /bin /lib ...        read-only, from the machine
<folder of Python>        read-only, if it is not in /usr; without installed packages
/dev                      null, zero, full, random, urandom
/proc                     of the processes in the sandbox
/sandbox                  private, with a limit of its size; /tmp and /dev/shm are in it
"""

import os
from collections.abc import Iterable

from rlscale.sandboxes.linux_calls import (
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_RELATIME,
    MS_REMOUNT,
    mount,
    pivot_root_here,
)

HOME = "/sandbox"
_TMP = f"{HOME}/.tmp"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs", "mime.types")
_ETC_OF_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_NUM_INODES = 65536
# Every Linux has this folder, and nothing below it is needed in a sandbox.
_MOUNT_POINT = "/sys"
# A remount in a user namespace must keep the flags of the original mount.
_KEPT_FLAGS = {
    os.ST_NODEV: MS_NODEV,
    os.ST_NOEXEC: MS_NOEXEC,
    os.ST_NOATIME: MS_NOATIME,
    os.ST_NODIRATIME: MS_NODIRATIME,
    os.ST_RELATIME: MS_RELATIME,
}


def enter_root(
    *, read_only: Iterable[str], hidden: Iterable[str], disk_bytes: int, user: int, has_network: bool
) -> None:
    """Builds the root file system in this process's mount namespace and enters it.

    Args:
        read_only: further folders and files, at the same paths.
        hidden: folders that are empty in the sandbox.
        user: numeric user and group that the private folder belongs to.
    """
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", _MOUNT_POINT, "tmpfs", flags=MS_NOSUID | MS_NODEV, data="size=1m,mode=755")
    for path in [*_SYSTEM, *(f"/etc/{name}" for name in _ETC + (_ETC_OF_NETWORK if has_network else ()))]:
        _show(path)
    _write_etc(user, has_network=has_network)
    _make_devices()
    _make_private(disk_bytes, user)
    # After the private folders: such a path may be in /tmp.
    for path in read_only:
        _show(path)
    for path in hidden:
        if os.path.isdir(_MOUNT_POINT + path):
            mount("tmpfs", _MOUNT_POINT + path, "tmpfs", flags=MS_NOSUID | MS_NODEV | MS_RDONLY, data="size=4k")
    proc = f"{_MOUNT_POINT}/proc"
    os.mkdir(proc)
    mount("proc", proc, "proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(_MOUNT_POINT)
    pivot_root_here()
    mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_private(disk_bytes: int, user: int) -> None:
    home, tmp = _MOUNT_POINT + HOME, f"{_MOUNT_POINT}/tmp"
    os.mkdir(home)
    limits = f"size={disk_bytes},nr_inodes={_NUM_INODES},mode=700,uid={user},gid={user}"
    mount("tmpfs", home, "tmpfs", flags=MS_NOSUID | MS_NODEV, data=limits)
    os.mkdir(_MOUNT_POINT + _TMP)
    os.chmod(_MOUNT_POINT + _TMP, 0o1777)
    os.mkdir(tmp)
    mount(_MOUNT_POINT + _TMP, tmp, flags=MS_BIND)


def _show(path: str) -> None:
    """Shows a path of the machine at the same place, read-only. Skips what does not exist or is shown already."""
    target = _MOUNT_POINT + path
    if os.path.lexists(target) or not os.path.exists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and path in _SYSTEM:
        os.symlink(os.readlink(path), target)
        return
    _make_target(path, target)
    mount(path, target, flags=MS_BIND)
    kept = sum(flag for found, flag in _KEPT_FLAGS.items() if os.statvfs(target).f_flag & found)
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def _make_target(path: str, target: str) -> None:
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        with open(target, "w"):
            pass


def _write_etc(user: int, *, has_network: bool) -> None:
    folder = f"{_MOUNT_POINT}/etc"
    os.makedirs(folder, exist_ok=True)
    files = {"passwd": f"sandbox:x:{user}:{user}::{HOME}:/bin/sh\n", "group": f"sandbox:x:{user}:\n"}
    if not has_network:
        files["hosts"] = "127.0.0.1 localhost\n::1 localhost\n"
    for name, text in files.items():
        with open(f"{folder}/{name}", "w") as opened:
            opened.write(text)


def _make_devices() -> None:
    folder = f"{_MOUNT_POINT}/dev"
    os.mkdir(folder)
    for name in _DEVICES:
        _make_target(f"/dev/{name}", f"{folder}/{name}")
        mount(f"/dev/{name}", f"{folder}/{name}", flags=MS_BIND)
    os.symlink("/proc/self/fd", f"{folder}/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{folder}/{name}")
    os.symlink(_TMP, f"{folder}/shm")
