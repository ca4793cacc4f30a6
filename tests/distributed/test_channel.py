"""Who may join, and how frames are cut out of a stream."""

import socket
import time

import pytest

from arbi_core.distributed.channel import FrameKind, Listener, connect, pack_frame, receive, take_frames
from arbi_core.errors import ConfigError, RankFailedError

TOKEN = b"k" * 32


@pytest.fixture
def listener():
    made = Listener("127.0.0.1", 3, TOKEN)
    yield made
    made.close()


def idle():
    pass


def test_ranks_that_know_the_token_join(listener):
    socks = [connect("127.0.0.1", listener.port, TOKEN, rank, 5) for rank in (2, 1)]
    joined = listener.join(5, idle)
    assert sorted(joined) == [1, 2]
    socks[0].sendall(pack_frame(FrameKind.VALUE, b"17"))
    assert receive(joined[2]) == (FrameKind.VALUE, b"17")
    for sock in [*socks, *joined.values()]:
        sock.close()


def test_a_stranger_without_the_token_is_refused(listener):
    with pytest.raises(RankFailedError, match="did not let rank 1 in"):
        connect("127.0.0.1", listener.port, b"x" * 32, 1, 5)
    with pytest.raises(RankFailedError, match="rank 1 has not joined within 0.2 s"):
        listener.join(0.2, idle)


def test_a_silent_stranger_keeps_nobody_out(listener):
    stranger = socket.create_connection(("127.0.0.1", listener.port))
    socks = [connect("127.0.0.1", listener.port, TOKEN, rank, 5) for rank in (1, 2)]
    assert sorted(listener.join(5, idle)) == [1, 2]
    for sock in [stranger, *socks]:
        sock.close()


@pytest.mark.parametrize("rank", [0, 3, 1])
def test_a_rank_that_has_no_place_is_refused(listener, rank):
    first = connect("127.0.0.1", listener.port, TOKEN, 1, 5)
    time.sleep(0.05)
    with pytest.raises(RankFailedError, match="refused this rank"):
        connect("127.0.0.1", listener.port, TOKEN, rank, 5)
    first.close()


def test_a_listener_that_knows_no_token_is_not_trusted():
    impostor = Listener("127.0.0.1", 2, b"other" * 7)
    with pytest.raises(RankFailedError, match="did not let rank 1 in"):
        connect("127.0.0.1", impostor.port, TOKEN, 1, 5)
    impostor.close()


def test_a_rank_that_can_no_longer_come_is_not_waited_for(listener):
    def alive():
        raise RankFailedError(2, "was killed by SIGKILL")

    with pytest.raises(RankFailedError, match="rank 2 was killed by SIGKILL"):
        listener.join(60, alive)


def test_an_address_of_another_host_is_a_configuration_error():
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1"):
        Listener("192.0.2.1", 2, TOKEN)


def test_nobody_there_is_said_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RankFailedError, match="rank 0 cannot be reached"):
        connect("127.0.0.1", port, TOKEN, 1, 1)


def test_frames_are_cut_wherever_the_stream_was_split():
    stream = pack_frame(FrameKind.STEP, b"abc") + pack_frame(FrameKind.CLOSE) + pack_frame(FrameKind.BEAT, b"x" * 300)
    for size in (1, 2, 7, 1000):
        buffer, found = bytearray(), []
        for at in range(0, len(stream), size):
            buffer += stream[at : at + size]
            found += take_frames(buffer)
        assert found == [(FrameKind.STEP, b"abc"), (FrameKind.CLOSE, b""), (FrameKind.BEAT, b"x" * 300)]
        assert not buffer


def test_noise_is_no_frame():
    with pytest.raises(ValueError, match="was announced"):
        take_frames(bytearray(b"\xff" * 16))
