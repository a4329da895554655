"""Reads what may make a rank slow from its node, for node_looks.py. Standard library only, Python 3.8 or newer.

All of it is counters: they are read before a look and after it, and what they mean is decided elsewhere, from the
difference. What cannot be read is missing, never zero: files of other users, processes that end, kernels that do not
count.
"""

from __future__ import annotations

import os
import time

from node_processes import ask_one, parse_stat, read_text, run_program
from node_sockets import FAMILIES, MAX_DESCRIPTORS, diagnose, socket_inodes

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Facts = dict[str, Any]

CGROUPS = "/sys/fs/cgroup"
QUOTA_FOLDERS = ("cpu", "cpu,cpuacct")
CPU_FILES = "/sys/devices/system/cpu"
SOCKETS_TIMEOUT_S = 2.0
PLACES_TIMEOUT_S = 2.0
GPU_TIMEOUT_S = 5.0
GPU_FIELDS = (
    "uuid", "pci.bus_id", "clocks.sm", "clocks.max.sm", "pcie.link.width.current", "pcie.link.width.max",
    "clocks_throttle_reasons.active", "temperature.gpu",
)  # fmt: skip
MAX_BUSIEST = 16
LEAST_CPU_S = 0.05
MAX_SCANNED = 20000
MAX_XIDS = 8
KERNEL_RECORDS = 20000
NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:")


def add_rank_counters(ranks: list[Facts]) -> None:
    """Add the counters of each rank; of one that has ended, an empty record."""
    sockets = ask_one(lambda: read_sockets([rank["pid"] for rank in ranks]), SOCKETS_TIMEOUT_S).get("sockets", {})
    for rank in ranks:
        found: Facts = {"mono": time.monotonic()}
        for name, read in RANK_READERS:
            value = tried(read, rank["pid"])
            if value is not None:
                found[name] = value
        if rank["pid"] in sockets:
            found["sockets"] = sockets[rank["pid"]]
        rank["counters"].append(found)


def tried(read: Callable[..., Any], *given: Any) -> Any:
    """Return what `read` returns, or None if it cannot be read."""
    try:
        return read(*given)
    except (OSError, ValueError, LookupError):
        return None


def read_schedule(pid: int) -> Facts:
    """Return {run_ns, delay_ns} of the main thread: on a core, and ready to run without one."""
    run_ns, delay_ns, slices = (int(word) for word in (read_text(f"/proc/{pid}/schedstat") or "").split())
    if not slices:
        raise ValueError("the kernel does not count")
    return {"run_ns": run_ns, "delay_ns": delay_ns}


def read_autograd(pid: int) -> int | None:
    """Return the nanoseconds that torch's own threads for backward passes have run; None if there are none."""
    found = None
    for name in os.listdir(f"/proc/{pid}/task"):
        if (read_text(f"/proc/{pid}/task/{name}/comm") or "").startswith("pt_autograd"):
            found = (found or 0) + int((read_text(f"/proc/{pid}/task/{name}/schedstat") or "").split()[0])
    return found


def read_faults(pid: int) -> int | None:
    """Return how many pages were fetched from a disk."""
    text = read_text(f"/proc/{pid}/stat")
    return int(parse_stat(text)["major_faults"]) if text else None


def read_swapped(pid: int) -> int:
    """Return the KiB of the process that are in swap."""
    _, _, rest = (read_text(f"/proc/{pid}/status") or "").partition("\nVmSwap:")
    return int(rest.split()[0])


def read_cores(pid: int) -> list[int]:
    """Return the cores on which the main thread may run."""
    return sorted(os.sched_getaffinity(pid))


def read_quotas(pid: int) -> list[Facts] | None:
    """Return {cgroup, cores, throttled, throttled_s, periods} of each cgroup that limits the process's CPU time."""
    text, found = read_text(f"/proc/{pid}/cgroup"), []
    if text is None:
        return None
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        folders = [CGROUPS, f"{CGROUPS}/unified"] if controllers == "" else [f"{CGROUPS}/{x}" for x in QUOTA_FOLDERS]
        if controllers == "" or "cpu" in controllers.split(","):
            found += quotas_above(next(filter(os.path.isdir, folders), ""), path, controllers == "")
    return found


def quotas_above(folder: str, path: str, is_unified: bool) -> list[Facts]:
    """Return the limits of a cgroup and of those around it."""
    found = []
    while folder and path not in ("", "/"):
        cores = tried(quota_of, folder + path, is_unified)
        counts = dict(line.split(" ", 1) for line in (read_text(f"{folder}{path}/cpu.stat") or "").splitlines())
        if cores is not None and "nr_throttled" in counts:
            in_us, in_ns = counts.get("throttled_usec"), counts.get("throttled_time")
            seconds = int(in_us) / 1e6 if in_us is not None else int(in_ns or 0) / 1e9
            number = {"throttled": int(counts["nr_throttled"]), "periods": int(counts["nr_periods"])}
            found.append({"cgroup": path, "cores": cores, "throttled_s": seconds, **number})
        path = path.rpartition("/")[0]
    return found


def quota_of(folder: str, is_unified: bool) -> float | None:
    """Return how many cores a cgroup may use at a time; None without a limit."""
    if is_unified:
        quota, period = (read_text(f"{folder}/cpu.max") or "max 1").split()
    else:
        quota, period = (read_text(f"{folder}/cpu.cfs_{name}_us") or "-1" for name in ("quota", "period"))
    return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)


RANK_READERS: tuple[tuple[str, Callable[[int], Any]], ...] = (
    ("schedule", read_schedule),
    ("autograd_ns", read_autograd),
    ("major_faults", read_faults),
    ("swapped_kib", read_swapped),
    ("cores", read_cores),
    ("quotas", read_quotas),
)


def read_sockets(pids: list[int]) -> Iterator[tuple[str, Any]]:
    """Yield {pid: {retransmitted, sent, round_trip_us}} over the established TCP connections of each process."""
    rows = {row[0]: row for family in FAMILIES for row in diagnose(family)}
    found = {}
    for pid in pids:
        if len(tried(os.listdir, f"/proc/{pid}/fd") or ()) <= MAX_DESCRIPTORS:
            inodes = set((tried(socket_inodes, pid) or {}).values())
            own = [rows[inode] for inode in inodes if inode in rows and rows[inode][5]]
            if own:
                sums = {"retransmitted": sum(row[3] for row in own), "sent": sum(row[4] for row in own)}
                found[pid] = dict(sums, round_trip_us=max(row[5] for row in own))
            yield "sockets", found


def read_places(ranks: list[Facts]) -> list[Facts]:
    """Return {path, free_share, free_inodes_share, pids} of the file systems where ranks write or stand."""

    def produce() -> Iterator[tuple[str, Any]]:
        places: dict[int, Facts] = {}
        for rank in ranks:
            for link, path in paths_of(rank["pid"]):
                space = tried(space_of, link)
                if space is not None:
                    place = places.setdefault(space.pop("device"), dict(space, path=path, pids=[]))
                    if rank["pid"] not in place["pids"]:
                        place["pids"].append(rank["pid"])
                yield "places", list(places.values())

    return list(ask_one(produce, PLACES_TIMEOUT_S).get("places", []))


def paths_of(pid: int) -> list[tuple[str, str]]:
    """Return [(link, path)] of the working directory of a process, its files, and the folders for short-lived ones."""
    links = [f"/proc/{pid}/cwd"]
    links += [f"/proc/{pid}/fd/{name}" for name in (tried(os.listdir, f"/proc/{pid}/fd") or ())[:MAX_DESCRIPTORS]]
    targets = [(link, str(tried(os.readlink, link) or "")) for link in links]
    files = [(link, path) for link, path in targets if path.startswith("/") and not path.startswith(NO_FILES)]
    return files + [(f"/proc/{pid}/root{path}", path) for path in ("/tmp", "/dev/shm")]


def space_of(path: str) -> Facts:
    """Return {device, free_share, free_inodes_share}: what is free for users. /proc and its like have no size."""
    space = os.statvfs(path)
    if not space.f_blocks:
        raise ValueError("no size")
    inodes = {"free_inodes_share": space.f_favail / space.f_files} if space.f_files else {}
    return {"device": os.stat(path).st_dev, "free_share": space.f_bavail / space.f_blocks, **inodes}


def read_machine() -> Facts:
    """Return the counters of the node: swap, TCP, clocks of its cores, and the time that its hypervisor took."""
    pages = dict(line.split() for line in (read_text("/proc/vmstat") or "").splitlines() if line.startswith("pswp"))
    return {
        "swapped_in": tried(lambda: int(pages["pswpin"])),
        "swapped_out": tried(lambda: int(pages["pswpout"])),
        "retransmitted": tried(read_snmp, "RetransSegs"),
        "sent": tried(read_snmp, "OutSegs"),
        "cores": {str(core): clocks for core in os.sched_getaffinity(0) if (clocks := tried(read_clock, core))},
        "stolen_ticks": tried(read_stolen),
        "num_cores": os.cpu_count(),
    }


def read_snmp(name: str) -> int:
    names, values = (line.split() for line in (read_text("/proc/net/snmp") or "").splitlines() if line[:4] == "Tcp:")
    return int(values[names.index(name)])


def read_stolen() -> dict[str, int]:
    """Return {core: clock ticks that the hypervisor gave to others}."""
    rows = [line.split() for line in (read_text("/proc/stat", 1 << 20) or "").splitlines()]
    return {row[0][3:]: int(row[8]) for row in rows if row and row[0][:3] == "cpu" and row[0] != "cpu"}


def read_clock(core: int) -> Facts | None:
    """Return {khz, base_khz, throttled} of a core, as far as it has them."""
    folder = f"{CPU_FILES}/cpu{core}"
    names = {
        "khz": "cpufreq/scaling_cur_freq", "limit_khz": "cpufreq/scaling_max_freq",
        "base_khz": "cpufreq/base_frequency", "throttled": "thermal_throttle/core_throttle_count",
    }  # fmt: skip
    texts = {name: read_text(f"{folder}/{file}") for name, file in names.items()}
    return {name: int(text) for name, text in texts.items() if text and text.strip().isdigit()} or None


class MoreProcesses:
    """Who else runs on the cores: {(pid, name): {core: clock ticks}}, from the whole table at each scan."""

    def __init__(self, ranks: set[int]) -> None:
        self._ranks = ranks
        self._last: dict[tuple[int, int], int] = {}
        self._used: dict[tuple[int, str], dict[int, int]] = {}
        self.scan()

    def scan(self) -> None:
        for name in os.listdir("/proc")[:MAX_SCANNED]:
            text = read_text(f"/proc/{name}/stat") if name.isdigit() else None
            if text and int(name) not in self._ranks and int(name) != os.getpid():
                fact = parse_stat(text)
                core = int(text.rpartition(")")[2].split()[36])
                key = int(name), fact["start_ticks"]
                ticks = fact["cpu_ticks"] - self._last.get(key, fact["cpu_ticks"])
                self._last[key] = fact["cpu_ticks"]
                if ticks > 0:
                    cores = self._used.setdefault((int(name), fact["comm"]), {})
                    cores[core] = cores.get(core, 0) + ticks

    def busiest(self) -> list[Facts]:
        """Return {pid, comm, cpu_s: {core: seconds}} of those that ran most."""
        per_s = os.sysconf("SC_CLK_TCK")
        rows: list[Facts] = [
            {"pid": pid, "comm": comm, "cpu_s": {str(core): ticks / per_s for core, ticks in cores.items()}}
            for (pid, comm), cores in self._used.items()
            if sum(cores.values()) / per_s >= LEAST_CPU_S
        ]
        return sorted(rows, key=lambda row: -sum(row["cpu_s"].values()))[:MAX_BUSIEST]


def read_gpus() -> Facts | None:
    """Return {cards, of_processes, xids} as nvidia-smi and the kernel's log have them; None where there is no card."""
    if not os.path.exists("/dev/nvidiactl"):
        return None
    cards = ask_card(f"--query-gpu={','.join(GPU_FIELDS)}")
    apps = ask_card("--query-compute-apps=pid,gpu_uuid")
    return {
        "cards": [dict(zip(GPU_FIELDS, row)) for row in cards if len(row) == len(GPU_FIELDS)],
        "of_processes": {row[0]: row[1] for row in apps if len(row) == 2},
        "xids": tried(read_xids),
    }


def ask_card(query: str) -> list[list[str]]:
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    status, output, _ = run_program(argv, GPU_TIMEOUT_S, {"PATH": os.environ.get("PATH", "/usr/bin")})
    return [[word.strip() for word in line.split(",")] for line in output.splitlines()] if status == 0 else []


def read_xids() -> list[str]:
    """Return the newest errors of cards in the kernel's log, as far as this user may read it."""
    found: list[str] = []
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(KERNEL_RECORDS):
            record = os.read(log, 1 << 13).decode("utf-8", "replace").partition(";")[2].splitlines()
            if record and "NVRM: Xid" in record[0]:
                found.append(record[0][:200])
    except BlockingIOError:
        pass  # that was the last record
    finally:
        os.close(log)
    return found[-MAX_XIDS:]
