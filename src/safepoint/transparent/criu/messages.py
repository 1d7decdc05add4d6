"""Turns CRIU's log into a reason and a hint.

CRIU's last error is often a consequence of an earlier line, so known causes are looked for in the whole log first.
"""

import re

_KNOWN = (
    (
        r"io_uring|send_fds failed \(-22\)",
        "a process uses io_uring, which CRIU cannot dump",
        "start the program with USE_LIBUV=0, or with a seccomp profile that refuses io_uring",
    ),
    (
        r"suspending seccomp failed",
        "a process has a seccomp filter, which CRIU cannot suspend",
        "in a container, start it with --security-opt seccomp=unconfined",
    ),
    (
        r"has bad (?:size|mode)",
        "a file that a process has open was changed after the processes were frozen",
        "restore the file; programs should use the mode 'a' to open files that grow",
    ),
    (
        r"Can't open file .* on restore|Can't open .*: No such file|stat(?:|fs) .*: No such file",
        "a file that a process has open or mapped is missing",
        "restore the file at the same path",
    ),
    (
        r"ghost file .* increase limit",
        "a process uses a large file that was deleted, or a library that an update has replaced",
        "start the program again, so that it uses the new version",
    ),
    (
        r"Can't create ghost .*File exists",
        "a file has the name that CRIU needs for a file that a process had open and had deleted",
        "try again; if that fails, find out which user makes the file",
    ),
    (
        r"Can't bind inet socket.*Cannot assign requested address",
        "a process used a network address that this machine or pod does not have",
        "restore the image where the address exists; programs that only use the loopback interface can move",
    ),
    (
        r"Can't bind .*No such file|fsnotify: Unable to open .*No such file",
        "a folder that a process watched, or in which it had a socket, is missing",
        "make the folder again",
    ),
    (
        r"build-?id|BuildID",
        "a program or a library that a process has mapped is not the same as when the process was frozen",
        "restore the image where the same versions are installed",
    ),
    (
        r"dangling tty|[Tt]ty.*(?:not a slave|external)|[Ff]ound (?:dangling )?tty|tty_(?:dump|verify)",
        "a process has a terminal of another session open",
        "start the program with setsid, and redirect its input and output to files",
    ),
    (
        r"[Ee]xternal socket|half of stream unix|[Uu]nix socket .* without peer|Can't dump.*unix",
        "a process is connected to a process outside of the tree by a Unix socket",
        "freeze the process that has started both, or close the connection",
    ),
    (
        r"pipe.*(?:external|not found)|[Ee]xternal pipe|Can't restore.*pipe",
        "a process has a pipe to a process outside of the tree",
        "redirect the input and output of the program to files",
    ),
    (
        r"/dev/nvidia|nvidia-uvm|nvidiactl",
        "a process has begun to use a GPU while it was frozen",
        "freeze it again",
    ),
    (
        r"Address already in use",
        "another program uses a port or the name of a socket that the processes had",
        "end that program, which `ss -tlnp` or `ss -xlp` shows, and try again",
    ),
    (
        r"Unexpected fle",
        "another program of this machine has sent data to CRIU",
        "find out which user runs it, and end it; then try again",
    ),
    (
        r"Can't (?:fork|clone).*: File exists|[Pp]id \d+ (?:do(?:es)? not match|is (?:already )?(?:used|busy))",
        "the number of a process is in use",
        "end the process that has this number, or restore in a container",
    ),
    (
        r"(?:traced|already being traced|ptrace.*Operation not permitted|PTRACE_SEIZE)",
        "a process is traced by another program",
        "end the debugger, and try again",
    ),
    (
        r"No such process|Unable to (?:get|dump) .*\bpid|[Nn]o process",
        "the process does not exist any more",
        "name a process that runs",
    ),
    (r"No space left on device", "the disk is full", "free some space, or name another folder"),
    (
        r"Operation not permitted|CAP_[A-Z_]+|Permission denied",
        "this process lacks a right that CRIU needs",
        "run the command as root, with all capabilities; in a container, with --privileged",
    ),
    (
        r"cpu.*(?:feature|capabilit)|CPU.*(?:feature|capabilit)|xsave",
        "this processor lacks features of the processor on which the processes were frozen",
        "restore the image on a machine with the same processor",
    ),
)
_ERROR = re.compile(r"^\S*\s*(?:\d+:\s*)?Error \([^)]*\):\s*(.+)$", re.MULTILINE)
_HARMLESS = re.compile(r"rlimit: |\s*$")
"""Lines that CRIU also writes when it succeeds."""
_MOST_CHARACTERS = 300
_MOST_LINES = 3
"""How many of the last lines are used if no line is an error. If CRIU lacks all rights, no line of its log is an
error."""


def explain(log: str) -> tuple[str, str]:
    """The reason why CRIU failed, and what the reader can do.

    Args:
        log: CRIU's log, or what it printed.
    """
    errors = [line for line in _ERROR.findall(log) if not _HARMLESS.match(line)]
    printed = [line for line in log.splitlines() if line.strip() and not _ERROR.match(line)]
    for pattern, reason, hint in _KNOWN:
        if any(re.search(pattern, line) for line in errors or printed[-_MOST_LINES:]):
            return reason, hint
    first = errors[0] if errors else (printed or ["it printed no reason"])[-1]
    return first[
        :_MOST_CHARACTERS
    ], "`safepoint doctor` shows what this machine can do; see also CRIU's documentation"
