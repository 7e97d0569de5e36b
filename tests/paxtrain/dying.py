"""Runs of a main that die at a chosen moment: at their n-th write into a folder, or when somebody kills them.

A small library, loaded before libc, counts the calls that change something in the folder: of Python, of orbax and of
tensorstore's threads alike. At the n-th one it kills the process, after half of a write has been done. Each run is a
fork of one process that has imported all modules, and loads its programs from jax's cache, so a run takes a second.
"""

import json
import mmap
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

ROOT = pathlib.Path(__file__).resolve().parents[2]

_LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct shared { _Atomic long count, limit; };
static struct shared *shared;
static const char *folder;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("DYING_COUNTER");
  folder = getenv("DYING_FOLDER");
  if (!path || !folder) return;
  int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
  void *found = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (found != MAP_FAILED) shared = found;
  syscall(SYS_close, fd);
}

static int inside(const char *path) { return path && !strncmp(path, folder, strlen(folder)); }

static int inside_fd(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return inside(path);
}

/* Return whether this is the call to die at. */
static int now(int counts) {
  if (!shared || !counts) return 0;
  return atomic_fetch_add(&shared->count, 1) + 1 == atomic_load(&shared->limit);
}

static void die(void) {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_PATH(result, name, parameters, arguments, where) \
  result name parameters { if (shared && now(where)) die(); return REAL(name) arguments; }

ON_PATH(int, rename, (const char *a, const char *b), (a, b), inside(a) || inside(b))
ON_PATH(int, renameat, (int x, const char *a, int y, const char *b), (x, a, y, b), inside(a) || inside(b))
ON_PATH(int, renameat2, (int x, const char *a, int y, const char *b, unsigned f), (x, a, y, b, f), inside(b))
ON_PATH(int, link, (const char *a, const char *b), (a, b), inside(b))
ON_PATH(int, linkat, (int x, const char *a, int y, const char *b, int f), (x, a, y, b, f), inside(b))
ON_PATH(int, unlink, (const char *a), (a), inside(a))
ON_PATH(int, unlinkat, (int x, const char *a, int f), (x, a, f), inside(a) || (x != AT_FDCWD && inside_fd(x)))
ON_PATH(int, rmdir, (const char *a), (a), inside(a))
ON_PATH(int, mkdir, (const char *a, mode_t m), (a, m), inside(a))
ON_PATH(int, mkdirat, (int x, const char *a, mode_t m), (x, a, m), inside(a))
ON_PATH(int, fsync, (int fd), (fd), inside_fd(fd))
ON_PATH(int, fdatasync, (int fd), (fd), inside_fd(fd))
ON_PATH(int, ftruncate, (int fd, off_t n), (fd, n), inside_fd(fd))
ON_PATH(int, ftruncate64, (int fd, off64_t n), (fd, n), inside_fd(fd))

#define OPEN(name, first, rest) \
  int name(first const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
    if (shared && (flags & (O_CREAT | O_TRUNC)) && now(inside(path))) die(); \
    return REAL(name)(rest path, flags, mode); }
#define NOTHING
#define COMMA ,
OPEN(open, NOTHING, NOTHING)
OPEN(open64, NOTHING, NOTHING)
OPEN(openat, int at COMMA, at COMMA)
OPEN(openat64, int at COMMA, at COMMA)

ssize_t write(int fd, const void *data, size_t n) {
  if (shared && now(inside_fd(fd))) { REAL(write)(fd, data, n / 2); die(); }
  return REAL(write)(fd, data, n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
  if (shared && now(inside_fd(fd))) { REAL(pwrite)(fd, data, n / 2, at); die(); }
  return REAL(pwrite)(fd, data, n, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
  if (shared && now(inside_fd(fd))) { REAL(pwrite64)(fd, data, n / 2, at); die(); }
  return REAL(pwrite64)(fd, data, n, at);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
  if (shared && now(inside_fd(fd))) { REAL(writev)(fd, parts, n / 2); die(); }
  return REAL(writev)(fd, parts, n);
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) {
  if (shared && now(inside_fd(fd))) { REAL(pwritev)(fd, parts, n / 2, at); die(); }
  return REAL(pwritev)(fd, parts, n, at);
}
"""

# Imports everything, then runs each line of its input in a fork, and prints "started PID" and "ended STATUS".
_SERVER = """
import gc, json, os, sys, traceback
import paxtrain.run.training, tensorboardX, orbax.checkpoint, tensorstore, matplotlib.figure
from paxtrain import command_line
from planner.measure import compute_timing
from tests import mains

name = sys.argv[1]
main = mains.load(name)
compute_timing._LEAST = 0.002  # the accuracy of what planner.run measures does not matter here
gc.collect()
gc.freeze()  # else each fork copies all that the modules hold when it collects garbage

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = [name, *job["arguments"]]
        if job["start_only"]:
            main.training.train_together = lambda *_, **__: sys.exit(0)
        try:
            command_line.run(main.main, main.define_flags)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print("started", child, flush=True)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""


class DyingRuns:
    """Runs of a main in forks of one process, as a context manager.

    Attributes:
        log: file with the output of all runs.
    """

    def __init__(self, home: pathlib.Path, folder: pathlib.Path, main: str = "paxtrain.train") -> None:
        """Start the process.

        Args:
            home: folder for the library, the counter, the log and jax's cache of programs.
            folder: folder whose changes are counted.
            main: module of the main.
        """
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "log"
        source, library = home / "dying.c", home / "dying.so"
        source.write_text(_LIBRARY)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        counter = home / "counter"
        counter.write_bytes(bytes(16))
        with counter.open("r+b") as file:
            self._shared = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")
        own = {
            "LD_PRELOAD": str(library),
            "DYING_COUNTER": str(counter),
            "DYING_FOLDER": str(folder),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(home / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, main],
            env=os.environ | own,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _hear(self, word: str) -> int:
        assert self._server.stdout is not None
        said = self._server.stdout.readline().split()
        assert said[:1] == [word], f"{said}, {self.log.read_text()[-3000:] if self.log.exists() else ''}"
        return int(said[1])

    def start(self, arguments: Sequence[Any], dies_at: int = 0, start_only: bool = False) -> int:
        """Start a run and return its process.

        Args:
            arguments: flags of the main.
            dies_at: number of the change at which it dies; 0: never.
            start_only: whether planner.run ends when it would begin to train.
        """
        self._shared[0], self._shared[1] = 0, dies_at
        assert self._server.stdin is not None
        job = {"arguments": list(map(str, arguments)), "log": str(self.log), "start_only": start_only}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return self._hear("started")

    def wait(self) -> int:
        """Wait for the end of the run, and return its exit code, or less than 0 for a signal."""
        return os.waitstatus_to_exitcode(self._hear("ended"))

    def run(self, arguments: Sequence[Any], dies_at: int = 0, start_only: bool = False) -> int:
        """Run to the end; see `start` and `wait`."""
        self.start(arguments, dies_at, start_only)
        return self.wait()

    @property
    def changes(self) -> int:
        """Number of changes in the folder since the last start."""
        return self._shared[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._server:  # which closes its pipes, and waits for its end
            pass
