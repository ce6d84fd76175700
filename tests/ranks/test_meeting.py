"""The places at which ranks meet."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.ranks.endpoints import listening, socket_file
from mbc.ranks.environment import RankEnvironment
from mbc.ranks.meeting import meet, meeting_seconds


def test_the_folder_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = socket_file("job")
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert socket_file("job") == place != socket_file("another")
    place.parent.chmod(0o770)
    with pytest.raises(MbcError, match=r"MBC261: ranks cannot meet in '.*': it must be a folder that you alone"):
        socket_file("job")
    place.parent.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    assert len(os.fsencode(socket_file("job"))) <= 107


def test_a_socket_that_was_left_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place))
    with (
        listening(place),
        pytest.raises(
            MbcError, match=r"MBC261: rank 0 cannot listen at .*: another training with this name listens there"
        ),
        listening(place),
    ):
        pass
    assert not place.exists()


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        environment = RankEnvironment(0, 2, 0, 1, "srun", "job", ("127.0.0.1", port))
        with pytest.raises(MbcError, match=f"MBC261: rank 0 cannot listen at 127.0.0.1:{port}: Address already in use"):
            meet(environment, {})


def test_an_address_that_nobody_tells() -> None:
    with pytest.raises(MbcError, match="MBC261: torchrun does not say where rank 0 of 4 on several machines is"):
        meet(RankEnvironment(3, 4, 1, 2, "torchrun", "job"), {})


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2 of 3"), (1, "rank 0 of 3")])
def test_waiting_ranks_name_the_missing_ones(rank: int, missing: str, monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("mbc.ranks.meeting.SILENCE_S", 0.2)
    with pytest.raises(MbcError, match=f"MBC262: {missing} did not come"):
        meet(RankEnvironment(rank, 3, rank, 3, "mbc", "job"), {"MBC_MEETING_S": "0.8"})
    said = capsys.readouterr().err
    assert said.startswith(f"waiting for {missing} at ") and said.count("\n") == 1


def test_how_long_ranks_wait() -> None:
    assert (meeting_seconds({}), meeting_seconds({"MBC_MEETING_S": "2.5"})) == (120.0, 2.5)
    with pytest.raises(MbcError, match="MBC261: MBC_MEETING_S is 'soon', which is not a number of seconds"):
        meeting_seconds({"MBC_MEETING_S": "soon"})
