from __future__ import annotations

import os
import socket

import pytest
from omni_client.launch import ports
from omni_runtime.errors import InvalidRequest

HOST = "127.0.0.1"


def test_zero_picks_different_free_ones() -> None:
    picked = ports.pick(HOST, {"http": 0, "grpc": 0, "metrics": 0})
    assert list(picked) == ["http", "grpc", "metrics"]
    assert len(set(picked.values())) == 3
    assert all(0 < port < 65536 for port in picked.values())


def test_a_number_is_kept() -> None:
    free = ports.pick(HOST, {"http": 0})["http"]
    assert ports.pick(HOST, {"http": 0, "grpc": free})["grpc"] == free


def test_a_taken_port_is_refused_with_its_flag() -> None:
    with socket.create_server((HOST, 0)) as taken, pytest.raises(InvalidRequest) as caught:
        ports.pick(HOST, {"http": 0, "metrics": taken.getsockname()[1]})
    assert caught.value.param == "metrics-port"
    assert "--metrics-port" in str(caught.value)


def test_one_port_for_two_is_refused() -> None:
    free = ports.pick(HOST, {"http": 0})["http"]
    with pytest.raises(InvalidRequest):
        ports.pick(HOST, {"http": free, "grpc": free})


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        ports.pick("nowhere.invalid", {"http": 0})


def test_held_by_sees_what_listens_and_not_what_is_connected() -> None:
    with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        held = ports.held_by(os.getpid())
        assert listener.getsockname()[1] in held
        assert client.getsockname()[1] not in held


def test_held_by_of_a_process_that_is_gone_is_empty() -> None:
    assert ports.held_by(2**22 + 1) == set()
