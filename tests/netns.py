"""Networks of a test's own: a loopback nobody else uses, and two nodes joined by a cable."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TIMEOUT = 120


def sent(device: str) -> int:
    """Bytes that a network device of this namespace has sent, as the kernel counts them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise AssertionError(f"no device {device}")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=_environment()
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def alone(*command: str) -> str:
    """Run a command in a namespace with only a loopback; return what it prints.

    Skips the test where that isn't allowed.
    """
    probe = ["unshare", "-n", "sh", "-c", "ip link set lo up"]
    try:
        allowed = _run(*probe)
    except FileNotFoundError as missing:
        pytest.skip(f"needs unshare and ip: {missing}")
    if allowed.returncode:
        pytest.skip(f"may not make a network namespace: {allowed.stderr.strip()}")
    done = _run("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def two_nodes() -> Iterator[tuple[list[str], list[str]]]:
    """Two namespaces joined by a cable, 10.77.0.1 and 10.77.0.2, each on a device ``wire``.

    Yields what to put before a command to run it on either node. Skips the test where namespaces
    aren't allowed.
    """
    tag = uuid.uuid4().hex[:6]
    nodes = [f"node{k}-{tag}" for k in range(2)]
    try:
        made = _run("ip", "netns", "add", nodes[0])
    except FileNotFoundError as missing:
        pytest.skip(f"needs ip: {missing}")
    if made.returncode:
        pytest.skip(f"may not make a network namespace: {made.stderr.strip()}")
    try:
        cable = ["link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", nodes[1]]
        commands = [["netns", "add", nodes[1]], ["-n", nodes[0], *cable]]
        for k, node in enumerate(nodes):
            commands += [
                ["-n", node, "addr", "add", f"10.77.0.{k + 1}/24", "dev", "wire"],
                ["-n", node, "link", "set", "wire", "up"],
                ["-n", node, "link", "set", "lo", "up"],
            ]
        for command in commands:
            done = _run("ip", *command)
            if done.returncode:
                pytest.skip(f"may not join namespaces: {done.stderr.strip()}")
        yield ["ip", "netns", "exec", nodes[0]], ["ip", "netns", "exec", nodes[1]]
    finally:
        for node in nodes:
            _run("ip", "netns", "del", node)
