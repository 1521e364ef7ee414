import os
import pathlib

import pytest

from mtuner_jax.checkpoints import folders


def test_a_folder_that_can_be_made_is_not_made_by_asking(tmp_path):
    folders.check_writable(tmp_path / "a" / "b", name="output_dir")
    folders.check_writable(tmp_path, name="output_dir")
    assert not list(tmp_path.iterdir())


def test_a_folder_below_a_file_is_refused_with_the_file(tmp_path):
    (tmp_path / "data.jsonl").touch()
    with pytest.raises(folders.FolderError, match=r"data\.jsonl is a file; choose"):
        folders.check_writable(tmp_path / "data.jsonl" / "run", name="output_dir")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc here")
def test_a_folder_where_nothing_can_be_written_is_refused(tmp_path):
    text = r"output_dir='/proc/run': nothing can be written to /proc \("
    with pytest.raises(folders.FolderError, match=text):
        folders.check_writable(pathlib.Path("/proc/run"), name="output_dir")
