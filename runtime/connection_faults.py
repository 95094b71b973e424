"""What broke between processes: an error of torch.distributed, gloo, HCCL or NCCL in the words of the users' guide.

The texts are those of torch 2.13 with gloo, each provoked once for the tests, of HCCL's error table (CANN hcomm, EI0002
to EI0020), and of torch's NCCL watchdog.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cost_models.errors import TitanPlanError
from runtime.error_texts import chain, in_order, shorten_text

_BEFORE_TRAINING: Final = 3
_FAILED: Final = 1


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the processes of a run meet, as the environment of this one says."""

    environ: Mapping[str, str]

    @property
    def address(self) -> str:
        return f"{self.get('MASTER_ADDR')}:{self.get('MASTER_PORT')}"

    @property
    def rank(self) -> str:
        return f"rank {self.environ.get('RANK', '?')} of {self.environ.get('WORLD_SIZE', '?')}"

    @property
    def has_peers_elsewhere(self) -> bool:
        local = self.environ.get("LOCAL_WORLD_SIZE")
        return local is not None and local != self.environ.get("WORLD_SIZE")

    def get(self, name: str) -> str:
        return self.environ.get(name) or f"({name} is not set)"

    def shown(self, *names: str) -> str:
        return ", ".join(f"{name} (now {self.environ.get(name) or 'unset'})" for name in names)


@dataclass(frozen=True, slots=True)
class _Fault:
    """A kind of fault: the texts that betray it, and how it is told."""

    texts: re.Pattern[str]
    tell: Callable[[str, _Place], TitanPlanError]


def is_connection_error(error: BaseException) -> bool:
    """Tell whether an error is of the links between processes; anything else is not for `connection_error`."""
    # torch raises RuntimeErrors; an OSError is of a file, or of a data set that is fetched.
    if isinstance(error, OSError):
        return False
    kinds = {kind.__name__ for one in chain(error) for kind in type(one).__mro__}
    return "DistError" in kinds or _fault_of(_text_of(error)) is not None


def connection_error(error: BaseException, environ: Mapping[str, str]) -> TitanPlanError:
    """Tell what broke, which host and port it was about, and what to look at, in the order of the users' guide.

    Args:
        error: what init_process_group or a collective raised.
        environ: of this process.

    Returns:
        R760 nobody answers at the master, R761 a port is taken, R762 some ranks did not come, R763 a rank went away,
        R764 a collective took too long, R765 the network interface is wrong, R766 not started by torchrun, or R769
        for a text that nobody has seen yet. The exit code is 1 for R763 and R764, which end a training, else 3.
    """
    text, place = _text_of(error), _Place(environ)
    fault = _fault_of(text)
    return fault.tell(text, place) if fault is not None else _unknown(text, place)


def _text_of(error: BaseException) -> str:
    return "\n".join(f"{one}" for one in chain(error))


def _fault_of(text: str) -> _Fault | None:
    return next((fault for fault in _FAULTS if fault.texts.search(text)), None)


def _nobody_answers(text: str, place: _Place) -> TitanPlanError:
    found = re.search(r"connect to \((?P<host>.+), (?P<port>\d+)\)", text)
    address = f"{found['host']}:{found['port']}" if found else place.address
    message = f"{place.rank}: nobody answers at {address} (MASTER_ADDR:MASTER_PORT): {shorten_text(text)}"
    return TitanPlanError("R760", message, _network_hints(place), exit_code=_BEFORE_TRAINING)


def _port_taken(text: str, place: _Place) -> TitanPlanError:
    if re.search(r"EI0019|EI0020|EJ0003", text):
        message = f"{place.rank}: a port of HCCL is taken on this node: {shorten_text(text)}"
        hint = (
            "another job uses the same devices or ports: `npu-smi info` names its processes; or move ours: "
            + place.shown("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
        )
        return TitanPlanError("R761", message, hint, exit_code=_BEFORE_TRAINING)
    found = re.search(r"port: (\d+)", text)
    port = found[1] if found else place.get("MASTER_PORT")
    holder = _holder(int(port)) if port.isdigit() else ""
    message = f"port {port} (MASTER_PORT) is taken on this node{holder and f' by {holder}'}"
    hint = (
        f"a run that was not stopped, or another job of this node, holds it: `ss -ltnp 'sport = :{port}'` names it; "
        "stop that one, or give all nodes of this run another --master_port"
    )
    return TitanPlanError("R761", message, hint, exit_code=_BEFORE_TRAINING)


def _ranks_missing(text: str, place: _Place) -> TitanPlanError:
    joined = re.search(r"(\d+)/(\d+) clients joined", text)
    what = f"only {joined[1]} of {joined[2]} ranks came" if joined else "not all ranks came"
    what += f" to {place.address} in time"
    if re.search("EI0006|EI0015", text):
        what = "HCCL did not reach all ranks in time"
    nodes = "every node runs the same --nnodes with its own --node_rank, and none of them failed before"
    message = f"{place.rank}: {what}: {shorten_text(text)}"
    return TitanPlanError("R762", message, _network_hints(place, nodes), exit_code=_BEFORE_TRAINING)


def _rank_gone(text: str, place: _Place) -> TitanPlanError:
    peer = re.search(r"(?:closed by peer|Read error|Write error) \[(?P<peer>[^\]]+)\]", text)
    who = f"a rank on {peer['peer']} went away" if peer else "another rank went away"
    message = f"{place.rank}: {who} during training: {shorten_text(text)}"
    hint = (
        "the rank that failed first has the reason: look at its log (`torchrun --log-dir DIR --redirects 3` keeps one "
        "of each), and for the kernel's killer (`dmesg | grep -i oom`); then start again: training resumes from the "
        "newest checkpoint"
    )
    return TitanPlanError("R763", message, hint, exit_code=_FAILED)


def _too_slow(text: str, place: _Place) -> TitanPlanError:
    message = f"{place.rank}: a collective took too long: {shorten_text(text)}"
    hint = (
        "a rank hangs or is far behind: look which one stopped printing, and for a slow disk under its data; if all "
        "are only slow, raise the limits: " + place.shown("HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT")
    )
    return TitanPlanError("R764", message, hint, exit_code=_FAILED)


def _wrong_interface(text: str, place: _Place) -> TitanPlanError:
    message = f"{place.rank}: the network interface to talk over was not found: {shorten_text(text)}"
    hint = "`ip -br addr` lists the interfaces of this node; set " + place.shown(
        "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"
    )
    return TitanPlanError("R765", message, hint, exit_code=_BEFORE_TRAINING)


def _not_launched(text: str, place: _Place) -> TitanPlanError:
    message = f"the launcher left a variable unset: {shorten_text(text)}"
    seen = place.shown("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    hint = f"start with torchrun (or titan-plan launch), which sets it; {seen}"
    return TitanPlanError("R766", message, hint, exit_code=_BEFORE_TRAINING)


def _unknown(text: str, place: _Place) -> TitanPlanError:
    message = f"{place.rank}: communication failed: {shorten_text(text)}"
    return TitanPlanError("R769", message, _network_hints(place), exit_code=_BEFORE_TRAINING)


def _network_hints(place: _Place, *first: str) -> str:
    """The order of the users' guide: the master's address, the firewall, the clocks; then what it leaves out."""
    host, port = place.get("MASTER_ADDR"), place.get("MASTER_PORT")
    address = f"MASTER_ADDR has to be the internal address of the main node (now {host})"
    if place.has_peers_elsewhere and re.match(r"localhost|127\.|::1|0\.0\.0\.0", host):
        address += ", and this one means each node itself"
    return in_order(
        [
            *first,
            address,
            f"the firewall has to leave MASTER_PORT {port} open: `nc -vz {host} {port}` from this node",
            "the clocks of all nodes have to agree (NTP): `chronyc tracking`",
            f"the interface of that network: {place.shown('GLOO_SOCKET_IFNAME', 'HCCL_SOCKET_IFNAME')}",
            f"for slow starts {place.shown('HCCL_CONNECT_TIMEOUT')}, e.g. 1800",
            f"{place.shown('HCCL_WHITELIST_DISABLE')}: 1 unless you keep a whitelist",
        ]
    )


def _holder(port: int) -> str:
    """The process that listens on a port; empty where this user may not see it."""
    import psutil

    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return f"process {one.pid} ({' '.join(psutil.Process(one.pid).cmdline())[:80]})"
    return ""


def _fault(texts: str, tell: Callable[[str, _Place], TitanPlanError]) -> _Fault:
    return _Fault(re.compile(texts, re.IGNORECASE), tell)


_FAULTS: Final = (
    # The first that matches tells it: a text often names the symptom of another kind at its end.
    _fault(r"EADDRINUSE|address already in use|EI0019|EI0020|EJ0003|have already been bound", _port_taken),
    _fault(r"environment variable \w+ expected, but not set", _not_launched),
    _fault(r"Unable to find (?:address for|interface)|ifa != nullptr|no socket interface found", _wrong_interface),
    _fault(r"trying to connect to|Connection refused|failed to connect|No route to host", _nobody_answers),
    _fault(
        r"waiting for clients|clients joined|wait timeout after|EI0006|EI0015|Getting socket times out"
        r"|retr\w+ ncclUniqueId|connectFullMesh failed",
        _ranks_missing,
    ),
    _fault(r"closed by peer|reset by peer|Broken pipe|ncclRemoteError|EI0012|EI0013|EI0018|Heartbeat Lost", _rank_gone),
    _fault(
        r"Timed out waiting|Watchdog caught collective operation timeout|EI0002|Notify register"
        r"|Wait timeout|Socket Timeout|operation timed out|failed to pass monitoredBarrier",
        _too_slow,
    ),
)
