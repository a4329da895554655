"""Connections that no longer carry anything: the link between two sets of ranks is to blame, and no rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bigsci_launch.spy.evidence.kernel import Socket
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, GracePeriod, Side, Strength
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.units import format_bytes


@dataclass(frozen=True, slots=True)
class StuckConnection:
    """A connection of `rank` on which the kernel retransmits what host `there` does not acknowledge."""

    rank: int
    here: str
    there: str
    socket: Socket

    def __str__(self) -> str:
        waiting = f"{format_bytes(self.socket.unacked)} from rank {self.rank} to {self.socket.remote}"
        what = "cannot be sent" if self.socket.is_unsent else "are sent again and again, unacknowledged"
        return f"{waiting} {what}"


def host_of(address: str) -> str:
    """Return `10.0.0.1` for `10.0.0.1:29500`."""
    return address.rpartition(":")[0]


def is_local(host: str) -> bool:
    """Whether an address names the machine itself."""
    return host.startswith("127.") or host in ("[0:0:0:0:0:0:0:1]", "0.0.0.0", "[0:0:0:0:0:0:0:0]")


def stuck_connections(evidence: Evidence) -> tuple[StuckConnection, ...]:
    """Return every connection between two hosts that no longer carries anything.

    That includes one on which nothing can be sent although the process at its other end has read everything.
    """
    unread = {socket.local for seen in evidence.ranks for socket in seen.sockets if socket.unread}
    return tuple(
        StuckConnection(seen.rank, host_of(socket.local), host_of(socket.remote), socket)
        for seen in evidence.ranks
        for socket in seen.sockets
        if host_of(socket.local) != host_of(socket.remote)
        and (socket.is_stuck or (socket.is_unsent and socket.has_stood and socket.remote not in unread))
    )


def hosts_of_ranks(ranks: Iterable[RankEvidence]) -> Mapping[str, tuple[int, ...]]:
    """Group ranks by the addresses of their own ends of connections."""
    found: dict[str, set[int]] = {}
    for seen in ranks:
        for socket in seen.sockets:
            host = host_of(socket.local)
            if not is_local(host) and socket.state == "ESTABLISHED":
                found.setdefault(host, set()).add(seen.rank)
    return {host: tuple(sorted(ranks)) for host, ranks in found.items()}


def link_carries_nothing(case: JobCase) -> Conclusion | None:
    """Connections between the hosts of ranks retransmit in vain.

    The kernel acknowledges data even for a process that is stopped or asleep: if it does not, the link has lost it. The
    other end must be a host whose ranks answered. If its node is gone, that silence is the verdict, not the network.
    """
    evidence, graph = case.evidence, case.graph
    stuck = stuck_connections(evidence)
    hosts = hosts_of_ranks(evidence.ranks)
    pairs = {frozenset((each.here, each.there)) for each in stuck if each.there in hosts and each.here in hosts}
    if not pairs or not graph.waits:
        return None
    involved = sorted({host for pair in pairs for host in pair})
    common = [host for host in involved if all(host in pair for pair in pairs)]
    sides = tuple(Side(hosts[host], f"host {host}") for host in involved)
    where = " and ".join(f"{evidence.names(side.ranks)} ({side.where})" for side in sides[:2])
    if len(involved) > 2:
        where = f"host {common[0]} and {len(involved) - 1} others" if len(common) == 1 else f"{len(involved)} hosts"
    return Conclusion(
        state=State.HANG,
        claim=f"the network between {where} carries nothing: {stuck[0]}; no rank is to blame",
        strength=Strength.AGREED if len(stuck) > 1 else Strength.DERIVED,
        hang_class=HangClass.LINK_DOWN,
        sides=sides,
        evidence=(*(str(each) for each in stuck[1:3]), _within_text(evidence, hosts)),
        missing=(f"whether small packets pass ({HangClass.LARGE_PACKETS_LOST}, a wrong MTU) or none at all",),
        next=(f"ping -c 3 {involved[-1]}; ping -c 3 -M do -s 8972 {involved[-1]}  # from {involved[0]}: small, large",),
        grace=GracePeriod.NONE,
    )


def _within_text(evidence: Evidence, hosts: Mapping[str, tuple[int, ...]]) -> str:
    within = sum(
        1
        for seen in evidence.ranks
        for socket in seen.sockets
        if socket.is_stuck and host_of(socket.local) == host_of(socket.remote)
    )
    return f"connections within one host that are stuck: {within}; hosts with ranks: {len(hosts)}"
