import logging
import warnings

import pytest

from mtuner_jax.training import logs

OURS = logging.getLogger("mtuner_jax.training.something")
THEIRS = logging.getLogger("absl")


def test_the_console_shows_our_lines_and_everybodys_warnings(capsys):
    with logs.to_console():
        OURS.info("hello %d", 1)
        OURS.info("in the file", extra=logs.FILE_ONLY)
        OURS.warning("careful")
        THEIRS.info("chatter")
        THEIRS.warning("trouble")
    OURS.info("after")
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["hello 1", "warning: careful", "warning: trouble"]


def test_other_processes_show_warnings_only(capsys, tmp_path):
    path = tmp_path / "train.log"
    with logs.to_console(is_primary=False), logs.to_file(is_primary=False):
        OURS.info("hello")
        OURS.warning("careful")
    assert capsys.readouterr().err == "warning: careful\n"
    assert not path.exists()


def test_the_file_gets_everything_and_is_appended_to(tmp_path):
    path = tmp_path / "train.log"
    for number in range(2):
        with logs.to_file() as log, warnings.catch_warnings():
            warnings.simplefilter("always")
            OURS.info("start %d", number, extra=logs.FILE_ONLY)
            log.open(path)
            warnings.warn("old option", UserWarning, stacklevel=1)
    text = path.read_text()
    assert "INFO mtuner_jax.training.something: start 0" in text
    assert "start 1" in text
    assert text.count("old option") >= 2


def test_handlers_are_gone_after_an_error(tmp_path):
    before = list(logging.getLogger().handlers)
    with pytest.raises(RuntimeError), logs.to_console(), logs.to_file() as log:
        log.open(tmp_path / "log")
        raise RuntimeError
    assert logging.getLogger().handlers == before


def test_nothing_is_written_before_the_log_is_opened_and_then_everything(tmp_path):
    path = tmp_path / "train.log"
    with logs.to_file():
        OURS.info("of a start that is refused")
    with logs.to_file() as log:
        values = [1]
        OURS.info("before, %s", values)
        values.append(2)
        assert not path.exists()
        log.open(path)
        OURS.info("after")
    lines = [line.partition("something: ")[2] for line in path.read_text().splitlines()]
    assert lines == ["before, [1]", "after"]


def test_a_full_disk_is_told_once_and_without_a_traceback(tmp_path, capfd):
    path = tmp_path / "train.log"
    path.symlink_to("/dev/full")
    with logs.to_file() as log:
        log.open(path)
        OURS.info("one")
        OURS.info("two")
    told = capfd.readouterr().err
    assert told == f"warning: {path} is not written: No space left on device\n"
