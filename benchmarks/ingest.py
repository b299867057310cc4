"""What it costs a server to take what agents send: python benchmarks/ingest.py

M records (of 16 values) a second of CPU of the server process, all its threads; each candidate in turn, round after
round, medians (of ratios: those of each round). Sent, decoded, checked (token, source, job, every length) and scattered
by rank into a table:

floor    a blocking loop on one TCP connection, frames with a length, 13 float64 a record, no header, no check; one byte
         of answer a frame, four frames under way. The least that Python can do.
wire     app/ingest.py with frames as agents send them, on one connection.
nodes    the same from 64 connections, a frame of 8 rows each in turn, at 12,800 frames a second: what 100,000 ranks
         send at one step a second. They come one by one, 78 us apart; making the connections is not counted.
http     the best HTTP server of Python: uvicorn with httptools and uvloop, a raw ASGI application that does what floor
         does, no header of ours, no check; POSTs over eight connections that are kept, one under way on each.
otlp     only parsing an OTLP request and reading its points, 16 gauges a record, without any network.

Goals: wire >= 0.55 x floor, >= 2 x http and >= 140 x otlp (frames of 1,000 rows); wire >= 0.8 x floor, >= 1.7 x http
and <= 18 us a frame (8 rows); <= 90 bytes a row (1,000 rows). nodes is told beside them: the goals were measured on few
connections that are always busy. Exit status 1 if a goal is missed.
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.app.ingest import Ingest, IngestConfig, Link
from trainwarden.core.auth import Tokens, TokensConfig, hashed
from trainwarden.core.child import spawn
from trainwarden.core.codec import frame_to_bytes
from trainwarden.core.model import Epoch, Event, Frame, JobId
from trainwarden.core.schemas import STEP
from trainwarden.core.wire import FRAME, WELCOME, Decoder, Hello, pack, say

ROUNDS, SECONDS, WINDOW, NODES, NODE_FRAMES_S = 9, 0.5, 4, 64, 12_800
RANKS = 100_000
FLOOR_DTYPE = np.dtype([("rank", "<u4"), ("step", "<u4"), ("t", "<u8"), ("v", "<f8", (13,))])
GOALS = {
    "wire/floor 1000": 0.55,
    "wire/http 1000": 2.0,
    "wire/otlp 1000": 140.0,
    "wire/floor 8": 0.8,
    "wire/http 8": 1.7,
}
SMALL_FRAME_US = 18.0
HTTP_CONNECTIONS = 8
BYTES_A_ROW = 90.0


def frame(rows: int, at: int) -> bytes:
    """One message of step rows; `at` tells inputs apart."""
    table = np.zeros(rows, STEP)
    table["rank"] = np.arange(rows) + at * rows
    table["values"] = np.random.default_rng(at).random((rows, 16), np.float32)
    stamp = time.time_ns()
    made = Frame(
        schema="step",
        source="rings@n1",
        job=JobId("train-17"),
        epoch=Epoch(1 << 32),
        seq=stamp // 1000 + at,
        sent_ns=stamp,
        seen_ns=0,
        names=(),
        rows=table,
    )
    return pack(FRAME, frame_to_bytes(made))


# the servers, each in a process of its own


def serve_floor() -> None:
    """As the raw TCP server that the goals were measured against."""
    table, buffer = np.zeros((RANKS, 13)), bytearray(1 << 24)
    view = memoryview(buffer)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            connection, _ = listening.accept()

            def read(size: int, connection: socket.socket = connection) -> bool:
                at = 0
                while at < size:
                    got = connection.recv_into(view[at:size])
                    if not got:
                        return False
                    at += got
                return True

            while read(4):
                size = int.from_bytes(buffer[:4], "little")
                read(size)
                rows = np.frombuffer(view[:size], FLOOR_DTYPE)
                table[rows["rank"]] = rows["v"]
                connection.sendall(b"k")
            connection.close()


def serve_http() -> None:
    """As the HTTP server that the goals were measured against."""
    import uvicorn

    table = np.zeros((RANKS, 13))

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        rows = np.frombuffer(body, FLOOR_DTYPE)
        table[rows["rank"]] = rows["v"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listening.getsockname()[1], flush=True)
    uvicorn.run(
        application,
        fd=listening.fileno(),
        lifespan="off",
        log_level="error",
        access_log=False,
        http="httptools",
        loop="uvloop",
    )


def serve_wire() -> None:
    """Our network side; what it hands on is scattered."""
    table = np.zeros((RANKS, 16), np.float32)

    def take(link: Link, items: list[Frame | Event], count: int, size: int) -> None:
        for item in items:
            if isinstance(item, Frame):
                table[item.rows["rank"]] = item.rows["values"]
        ingest.wait(-size)

    tokens = Tokens(TokensConfig(agents={"n1": hashed("t")}))
    ingest = Ingest(IngestConfig(rate_bytes=1 << 40), tokens, take, print, None)
    print(ingest.start("127.0.0.1", 0)[1], flush=True)
    threading.Event().wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, to the nanosecond."""
    tasks = (Path("/proc") / str(pid) / "task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


# those who send: each says when its connections stand (they are made once), and gives how many records it sent


def floor_table(rows: int, at: int) -> NDArray[np.void]:
    table = np.zeros(rows, FLOOR_DTYPE)
    table["rank"] = np.arange(rows) + at * rows
    table["v"] = np.random.default_rng(at).random((rows, 13))
    return table


def to_floor(port: int, rows: int, connected: Callable[[], None]) -> int:
    tables = [floor_table(rows, at) for at in range(8)]
    inputs = [table.nbytes.to_bytes(4, "little") + table.tobytes() for table in tables]
    sent, end_s = 0, time.monotonic() + SECONDS
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connected()
        under_way = 0
        while time.monotonic() < end_s or under_way:
            while under_way < WINDOW and time.monotonic() < end_s:
                connection.sendall(inputs[sent % 8])
                sent, under_way = sent + 1, under_way + 1
            under_way -= len(connection.recv(64))
    return sent * rows


def to_http(port: int, rows: int, connected: Callable[[], None]) -> int:
    inputs = [floor_table(rows, at).tobytes() for at in range(8)]
    head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(inputs[0])}\r\n\r\n".encode()
    sent, end_s = 0, time.monotonic() + SECONDS
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(HTTP_CONNECTIONS)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected()
    while time.monotonic() < end_s:
        for at, connection in enumerate(connections):
            connection.sendall(head + inputs[at])
        for connection in connections:
            assert connection.recv(4096).startswith(b"HTTP/1.1 204")
        sent += HTTP_CONNECTIONS
    for connection in connections:
        connection.close()
    return sent * rows


def greeted(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(say(Hello(node="n1", token="t", uplink="u")))
    assert next(iter(Decoder(WELCOME).feed(connection.recv(4096))))[0] == WELCOME
    return connection


def ended(connection: socket.socket) -> None:
    """Hang up, and wait until all was read: the server hangs up in turn."""
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    connection.close()


def to_wire(port: int, rows: int, connected: Callable[[], None]) -> int:
    inputs = [frame(rows, at) for at in range(8)]
    a_turn = max(1, 64 * 1024 // len(inputs[0]) // 8) if rows < 1000 else 1
    turns = [b"".join(inputs) * a_turn] if rows < 1000 else inputs
    sent, end_s = 0, time.monotonic() + SECONDS
    connection = greeted(port)
    connected()
    while time.monotonic() < end_s:
        connection.sendall(turns[sent % len(turns)])
        sent += 1
    ended(connection)
    return sent * rows * (8 * a_turn if rows < 1000 else 1)


def to_wire_from_nodes(port: int, rows: int, connected: Callable[[], None]) -> int:
    inputs = [frame(rows, at) for at in range(NODES)]
    connections = [greeted(port) for _ in range(NODES)]
    connected()
    began_s, sent = time.monotonic(), 0
    while sent < NODE_FRAMES_S * SECONDS:
        connections[sent % NODES].sendall(inputs[sent % NODES])
        sent += 1
        while time.monotonic() - began_s < sent / NODE_FRAMES_S:
            pass  # a sleep would bring frames together
    for connection in connections:
        ended(connection)
    return sent * rows


def measured(pid: int, port: int, rows: int, send: Callable[[int, int, Callable[[], None]], int]) -> float:
    """M records a second of CPU of that process."""
    began_s: list[float] = []
    records = send(port, rows, lambda: began_s.append(cpu_s(pid)))
    time.sleep(0.05)
    return records / (cpu_s(pid) - began_s[0]) / 1e6


def otlp(records: int) -> Callable[[], float]:
    """Reads a request of so many records; gives M records a CPU second."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    request = ExportMetricsServiceRequest()
    scope = request.resource_metrics.add().scope_metrics.add()
    for signal in range(16):
        points = scope.metrics.add(name=f"signal_{signal}").gauge.data_points
        for rank in range(records):
            point = points.add(time_unix_nano=1_800_000_000_000_000_000, as_double=rank / 7)
            point.attributes.add(key="rank").value.int_value = rank
    body, table = request.SerializeToString(), np.zeros((records, 16))

    def read() -> float:
        began = time.process_time()
        parsed = ExportMetricsServiceRequest.FromString(body)
        for resource in parsed.resource_metrics:
            for in_scope in resource.scope_metrics:
                for signal, metric in enumerate(in_scope.metrics):
                    for point in metric.gauge.data_points:
                        table[point.attributes[0].value.int_value, signal] = point.as_double
        return records / (time.process_time() - began) / 1e6

    return read


def main() -> int:
    """Measure, print, and tell by the exit status whether the goals are met."""
    servers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    found: dict[str, list[float]] = {}
    read_otlp = otlp(1000)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("floor", "wire", "http"):
            out = Path(folder) / name
            with out.open("wb") as file:
                process = spawn([sys.executable, __file__, name], out=file, new_session=False)
            while not out.read_text().endswith("\n"):
                time.sleep(0.02)
            servers[name] = process, int(out.read_text())
        try:
            for _ in range(ROUNDS):
                for rows in (1000, 8):
                    for name, server, send in (
                        ("floor", "floor", to_floor),
                        ("wire", "wire", to_wire),
                        ("http", "http", to_http),
                        *([("nodes", "wire", to_wire_from_nodes)] if rows == 8 else []),
                    ):
                        process, port = servers[server]
                        found.setdefault(f"{name} {rows}", []).append(measured(process.pid, port, rows, send))
                found.setdefault("otlp 1000", []).append(read_otlp())
        finally:
            for process, _ in servers.values():
                process.kill()
                process.wait()
    return told({name: statistics.median(values) for name, values in found.items()}, found)


def told(median: dict[str, float], found: dict[str, list[float]]) -> int:
    for name, value in sorted(median.items()):
        size = int(name.split()[1])
        spread = f"[{min(found[name]):.3g}..{max(found[name]):.3g}]"
        print(f"{name:12} {value:8.3f} M records a CPU second {spread:18} {size / value:8.1f} us a frame")
    missed = []
    for goal, least in GOALS.items():
        (one, other), rows = goal.split()[0].split("/"), goal.split()[1]
        pairs = zip(found[f"{one} {rows}"], found[f"{other} {rows}"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        missed += [goal] if ratio < least else []
        print(f"{goal}: {ratio:.2f} (goal >= {least:g}) {'FAIL' if ratio < least else 'PASS'}")
    for name in ("floor 8", "http 8"):
        print(f"nodes/{name}: {median['nodes 8'] / median[name]:.2f} (told, no goal)")
    frame_us = 8 / median["wire 8"]
    missed += ["us a frame"] if frame_us > SMALL_FRAME_US else []
    verdict = "FAIL" if frame_us > SMALL_FRAME_US else "PASS"
    print(f"us a frame of 8 rows: {frame_us:.1f} (goal <= {SMALL_FRAME_US:g}) {verdict}")
    sizes = {rows: len(frame(rows, 0)) / rows for rows in (1000, 8)}
    missed += ["bytes a row"] if sizes[1000] > BYTES_A_ROW else []
    verdict = "FAIL" if sizes[1000] > BYTES_A_ROW else "PASS"
    print(f"bytes a row: {sizes[1000]:.1f} of 1,000 (goal <= {BYTES_A_ROW:g}) {verdict}; {sizes[8]:.1f} of 8 (told)")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return bool(missed)


if __name__ == "__main__":
    {"floor": serve_floor, "wire": serve_wire, "http": serve_http}.get(
        sys.argv[1] if sys.argv[1:] else "", lambda: sys.exit(main())
    )()
