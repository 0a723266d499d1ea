"""How the ranks of a job find each other: the store, and who has not come."""

from __future__ import annotations

import datetime
import errno
import os
import socket

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from warpsmith.distributed.launch.environment import LOOPBACK, LaunchEnvironment

_meetings = 0  # of this process: a second one must not read the first one's keys, and all ranks count alike
_NAMED = 16  # ranks that a message lists


def meet(place: LaunchEnvironment, timeout_s: float) -> Store:
    """A store that all ranks of the job have reached.

    Raises:
        RuntimeError: the port is taken, nobody answers, or ranks are missing at the timeout.
    """
    global _meetings
    _meetings += 1
    if place.address is None or place.port is None:
        return HashStore()
    timeout = datetime.timedelta(seconds=timeout_s)
    # All ranks of one host meet on the loopback interface, whatever name MASTER_ADDR has for the host.
    address = LOOPBACK if place.one_host and not place.agent_store else place.address
    listener = None
    if place.rank == 0 and not place.agent_store:
        listener = _listen(place, address, place.port)
    try:
        store: Store = TCPStore(
            address,
            place.port,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"warpsmith/{attempt}/{_meetings}", store)
        _wait_for_all(store, place, timeout)
    except RuntimeError as error:
        if str(error).startswith("init:"):
            raise
        raise RuntimeError(
            f"init: {place.name}: no store of this job answers at {address}:{place.port} within {timeout_s:g} s: look "
            f"for a message of rank 0; check MASTER_ADDR, MASTER_PORT and the firewall ({first_line(error)})"
        ) from error
    store.set_timeout(timeout)
    return store


def _listen(place: LaunchEnvironment, address: str, port: int) -> socket.socket:
    """A socket of rank 0, bound to the address at which the others look for it, not to all interfaces."""
    try:
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise RuntimeError(
            f"init: {place.name}: MASTER_ADDR: expected the name or address of this host, got {address!r} ({error})"
        ) from error
    host = str(found[0])
    if not place.one_host and (host.startswith("127.") or host == "::1"):
        host = ""  # the host's name is an alias of loopback here, but not on the other hosts
    for bound in (host, ""):  # an address that the network translates is not one of this host's
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((bound, port))
            listener.listen(2048)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL and bound:
                continue
            remedy = "stop the other job, or set MASTER_PORT to a free port for all ranks"
            if error.errno == errno.EADDRINUSE:
                raise RuntimeError(f"init: {place.name}: port {port} is in use on this host: {remedy}") from error
            raise RuntimeError(f"init: {place.name}: cannot listen at {address}:{port}: {error.strerror}") from error
    raise RuntimeError(f"init: {place.name}: cannot listen at {address}:{port}")


def _wait_for_all(store: Store, place: LaunchEnvironment, timeout: datetime.timedelta) -> None:
    size = store.compare_set("world size", "", str(place.world_size)).decode()
    if size != str(place.world_size):
        raise RuntimeError(
            f"init: {place.name}: another rank of this job has a world of {size}: set the same WORLD_SIZE for all "
            "ranks, and give each job its own MASTER_PORT"
        )
    if store.add(f"rank {place.rank}", 1) > 1:
        raise RuntimeError(
            f"init: {place.name}: another process has come as rank {place.rank}: give each its own RANK, and each job "
            "its own MASTER_PORT"
        )
    if store.add("arrived", 1) == place.world_size:
        store.set("all", "")
    try:
        store.wait(["all"], timeout)
    except RuntimeError as error:
        missing = [r for r in range(place.world_size) if not store.check([f"rank {r}"])]
        if not missing:
            raise
        names = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
        raise RuntimeError(
            f"init: {place.name}: {len(missing)} of {place.world_size} ranks have not come within "
            f"{timeout.total_seconds():g} s: {names}: look for their messages, or give a longer timeout_s"
        ) from error


def keep_to_loopback() -> None:
    """Lets gloo and NCCL listen on the loopback interface, unless the user has named another."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
