"""Reading text that a user names: what would never end is refused at once."""

import json
import os
import socket
from pathlib import Path

import pytest

from holdfast.text_files import UNPARSABLE, read_text


def test_a_file_its_link_and_the_null_device_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("naïve")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "file") == read_text(tmp_path / "link") == "naïve"
    assert read_text(Path(os.devnull)) == ""


@pytest.mark.timeout(20)
def test_devices_pipes_and_sockets_are_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        names = ("fifo", "link", "socket")
        for path in (*(tmp_path / name for name in names), Path("/dev/zero")):
            with pytest.raises(OSError, match="it is a device or a pipe") as refused:
                read_text(path)
            assert refused.value.filename == str(path)
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            read_text(path)


def test_text_that_nests_too_deep_is_among_what_cannot_be_parsed() -> None:
    for text in ("[" * 100_000, "{", "9" * 10_000):
        with pytest.raises(UNPARSABLE):
            json.loads(text)
