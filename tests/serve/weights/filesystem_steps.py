"""Runs a function in a child process under ptrace and ends the child at its n-th step that changes the file system.

Every system call that can change a file or a folder is a step, whoever makes it: nothing that the code under test calls
has to be known or replaced. A seccomp filter stops the child at these calls alone. x86-64 Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

TRACEME, PEEKUSER, POKEUSER, CONTINUE, TO_NEXT_CALL, SETOPTIONS = 0, 3, 6, 7, 24, 0x4200
SYSGOOD, TRACE_SECCOMP, EXITKILL = 1, 1 << 7, 1 << 20
AT_STEP = signal.SIGTRAP | 7 << 8
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
# Offsets in struct user of <sys/user.h>: what is asked for, and its first three arguments.
CALL, FIRST, SECOND, THIRD = (8 * place for place in (15, 14, 13, 12))
OPEN, OPENAT, CREATES = 2, 257, os.O_CREAT | os.O_TRUNC
CALLS = {
    **{1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 40: "sendfile", 326: "copy_file_range"},
    **{74: "fsync", 75: "fdatasync", 162: "sync", 76: "truncate", 77: "ftruncate", 285: "fallocate"},
    **{82: "rename", 264: "renameat", 316: "renameat2", 86: "link", 88: "symlink", 265: "linkat", 266: "symlinkat"},
    **{83: "mkdir", 258: "mkdirat", 84: "rmdir", 87: "unlink", 263: "unlinkat", 85: "creat"},
    **{90: "chmod", 91: "fchmod", 280: "utimensat", OPEN: "open", OPENAT: "openat"},
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Step(NamedTuple):
    """The ``number``-th step, from 0, is not made; ``torn`` is a write of which half the bytes are."""

    number: int
    torn: bool = False


@dataclass
class Run:
    """The steps that a child came to, by name; ``killed`` if it did not get past the last one."""

    steps: list[str]
    killed: bool


def run(function: Callable[[], object], kill_at: Step | None = None) -> Run:
    """Calls ``function`` in a fork of this process.

    Raises OSError where the kernel does not let a process trace its child, RuntimeError when the function fails.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _ptrace(TRACEME, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            _stop_at_steps()
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSTOPPED(status):
        _ptrace(SETOPTIONS, child, 0, SYSGOOD | TRACE_SECCOMP | EXITKILL)
    found, signalled = Run([], killed=False), 0
    while os.WIFSTOPPED(status):
        if status >> 8 == AT_STEP:
            signalled = 0
            if (name := _step(child)) is not None:
                found.steps.append(name)
                if kill_at is not None and len(found.steps) > kill_at.number:
                    if kill_at.torn:
                        _write_half(child, name)
                    break
        else:
            signalled = 0 if os.WSTOPSIG(status) == signal.SIGSTOP else os.WSTOPSIG(status)
        _ptrace(CONTINUE, child, 0, signalled)
        _, status = os.waitpid(child, 0)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        found.killed = True
    elif status != 0:
        raise RuntimeError(f"the child ended with status {status:#x} after {len(found.steps)} steps")
    return found


def _stop_at_steps() -> None:
    """Has the kernel stop this process for its tracer at the calls of CALLS."""
    load_number, jump_if_equal, answer = 0x20, 0x15, 0x06
    program = [(load_number, 0, 0, 0)]
    for place, number in enumerate(CALLS, 1):
        program.append((jump_if_equal, len(CALLS) - place + 1, 0, number))
    program += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x7FF00000)]  # go on; stop for the tracer
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    if _libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or _libc.prctl(SET_SECCOMP, FILTER, described, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp filter refused")


def _step(child: int) -> str | None:
    """The name of the call that the child is about to make, when it is a step."""
    number = _ptrace(PEEKUSER, child, CALL, 0)
    name = CALLS.get(number)
    if number in (OPEN, OPENAT):
        return name if _ptrace(PEEKUSER, child, SECOND if number == OPEN else THIRD, 0) & CREATES else None
    if name is not None and "write" in name and _ptrace(PEEKUSER, child, FIRST, 0) <= 2:
        return None  # standard output
    return name


def _write_half(child: int, name: str) -> None:
    """Lets a write go on with half its bytes, and stops the child behind it."""
    assert name == "write", f"{name} cannot be torn"
    _ptrace(POKEUSER, child, THIRD, _ptrace(PEEKUSER, child, THIRD, 0) // 2)
    _ptrace(TO_NEXT_CALL, child, 0, 0)
    os.waitpid(child, 0)


def _ptrace(request: int, child: int, address: int, data: int) -> int:
    ctypes.set_errno(0)
    result = int(_libc.ptrace(request, child, address, data))
    if ctypes.get_errno():
        raise OSError(ctypes.get_errno(), f"ptrace request {request}: {os.strerror(ctypes.get_errno())}")
    return result
