"""A process that hangs in a known function: `python hung_rank.py PLACE READY_FIFO`."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time


def wait_for_peers() -> None:
    time.sleep(900)


def load_batch() -> None:
    time.sleep(900)


def tokenise() -> None:
    while True:
        pass


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def read_shard() -> None:
    """Sleep uninterruptibly: posix_spawn suspends the caller until its child runs, and the child waits for a writer."""
    os.mkfifo(f"{READY}.never")
    opening = (os.POSIX_SPAWN_OPEN, 0, f"{READY}.never", os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opening])


def wait_for_worker() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    worker.wait()


def send_result() -> None:
    """Send to a peer that does not read, until the queues of both sides are full."""
    server = socket.create_server(("127.0.0.1", 0))
    connection = socket.create_connection(server.getsockname())
    _unread = server.accept()
    connection.sendall(b"x" * (1 << 24))


def wait_for_lock() -> None:
    """Wait for a file that the child has locked."""
    lock = open(f"{READY}.lock", "w")  # noqa: SIM115, PTH123
    if os.fork() == 0:
        own = open(f"{READY}.lock", "w")  # noqa: SIM115, PTH123
        fcntl.flock(own, fcntl.LOCK_EX)
        hold_lock()
    while not is_locked(lock):
        time.sleep(0.01)
    fcntl.flock(lock, fcntl.LOCK_EX)


def hold_lock() -> None:
    time.sleep(900)


def is_locked(lock: object) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)  # type: ignore[arg-type]
    return False


def write_log() -> None:
    """Write into a pipe that the child does not read."""
    sleeper = subprocess.Popen(["sleep", "120"], stdin=subprocess.PIPE)
    os.write(sleeper.stdin.fileno(), b"x" * (1 << 20))  # type: ignore[union-attr]


def compile_kernels() -> None:
    """Wait for a child that works."""
    subprocess.run([sys.executable, "-c", "while True: pass"], check=True, timeout=120)


def end_worker() -> None:
    """Sleep while another thread of this process cannot run."""
    import threading

    threading.Thread(target=read_shard, name="loader").start()
    time.sleep(900)


def train_step() -> None:
    while True:
        time.sleep(0.02)


def hold_memory_map() -> None:
    """Hold the lock of the own memory map, which `ps` and py-spy need too. FROZEN_DISK must be thawed later."""
    import ctypes
    import mmap
    import threading

    disk, libc = os.environ["FROZEN_DISK"], ctypes.CDLL(None)
    with open(f"{disk}/data", "w+b") as file:  # noqa: PTH123
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _unused = mapped[0]
    folder = os.open(disk, os.O_RDONLY)
    fcntl.ioctl(folder, 0xC0045877, 0)  # FIFREEZE
    threading.Thread(target=libc.memset, args=(ctypes.c_void_p(address), 1, 1), daemon=True).start()
    time.sleep(0.3)
    libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ)


def send_to_peer() -> None:
    """Send 10 MB to the child process, which reads all of it."""
    server = socket.create_server(("127.0.0.1", 0))
    connection = socket.create_connection(server.getsockname())
    peer, _ = server.accept()
    if os.fork() == 0:
        connection.close()
        while peer.recv(1 << 16):
            pass
        time.sleep(900)
    peer.close()
    connection.sendall(b"x" * 10_000_000)
    time.sleep(900)


def save_state() -> None:
    """Write 10 MB to a file."""
    with open(f"{READY}.state", "wb") as file:  # noqa: PTH123
        file.write(b"x" * 10_000_000)
        file.flush()
        time.sleep(900)


def poll_queue() -> None:
    """Poll, and change the place every three seconds."""
    while True:
        poll_first()
        poll_second()


def poll_first() -> None:
    for _ in range(60):
        time.sleep(0.05)


def poll_second() -> None:
    for _ in range(60):
        time.sleep(0.05)


READY = sys.argv[2]
signal.alarm(120)
with open(READY, "w") as fifo:  # noqa: PTH123
    fifo.write("ready\n")
globals()[sys.argv[1]]()
time.sleep(900)
