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
    with logs.to_console(is_primary=False), logs.to_file(path, is_primary=False):
        OURS.info("hello")
        OURS.warning("careful")
    assert capsys.readouterr().err == "warning: careful\n"
    assert not path.exists()


def test_the_file_gets_everything_and_is_appended_to(tmp_path):
    path = tmp_path / "train.log"
    for number in range(2):
        with logs.to_file(path), warnings.catch_warnings():
            warnings.simplefilter("always")
            OURS.info("start %d", number, extra=logs.FILE_ONLY)
            warnings.warn("old option", UserWarning, stacklevel=1)
    text = path.read_text()
    assert "INFO mtuner_jax.training.something: start 0" in text
    assert "start 1" in text
    assert text.count("old option") >= 2


def test_handlers_are_gone_after_an_error(tmp_path):
    before = list(logging.getLogger().handlers)
    with pytest.raises(RuntimeError), logs.to_console(), logs.to_file(tmp_path / "log"):
        raise RuntimeError
    assert logging.getLogger().handlers == before
