import json
import logging

import pytest

from mtuner_jax import configs
from mtuner_jax.data import errors, ingestion, rendering, summaries
from tests.data import chat_tokenizers

TOKENIZER = chat_tokenizers.chatml()


def row(question="q", answer="a"):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write(path, *rows):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def ingest(*paths, max_length=64, max_samples=0, **settings):
    settings = configs.DatasetConfig(**settings)
    renderer = rendering.Renderer(TOKENIZER, settings, max_length=max_length)
    return ingestion.ingest(paths, renderer, settings, max_samples=max_samples)


def test_an_error_names_file_and_line_and_the_way_out(tmp_path):
    path = write(tmp_path / "data.jsonl", row(), "", row(), '{"messages": 3}')
    with pytest.raises(
        errors.DataError,
        match=r"data\.jsonl:4: wrong type: 'messages' must be an array of messages, "
        r"found the number 3 \(dataset\.on_bad_sample: skip leaves",
    ):
        ingest(path)


def test_skipped_lines_are_counted_by_reason_and_keep_their_ids(tmp_path, caplog):
    bad = ['{"a": 1,}', '{"messages": 3}', '{"messages": [1]}'] * 3
    path = write(tmp_path / "data.jsonl", *bad, row(), "", row())
    dataset = ingest(path, on_bad_sample=configs.OnBadSample("skip"))
    assert dataset.counts.read == 11
    assert dataset.counts.skipped == {"wrong type": 6, "invalid JSON": 3}
    assert dataset.samples.sample_ids.tolist() == [9, 10]
    assert caplog.text.count("; skipped") == ingestion.MAX_LOGGED_SKIPS
    assert "further skipped lines are only counted" in caplog.text


def test_a_file_of_another_encoding_stops_even_when_skipping(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(row()).encode("utf-16"))
    with pytest.raises(errors.DataError, match="looks like UTF-16"):
        ingest(str(path), on_bad_sample=configs.OnBadSample("skip"))


@pytest.mark.parametrize("content", ["", "\n\n \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(errors.DataError, match=r"data\.jsonl: no samples$"):
        ingest(str(path))


def test_a_file_of_which_all_lines_are_skipped_is_an_error(tmp_path):
    path = write(tmp_path / "data.jsonl", "{", "{", '{"texts": "a"}')
    with pytest.raises(
        errors.DataError,
        match=r"no samples left of 3 read: 3 skipped \(2 invalid JSON, 1 unknown fo",
    ):
        ingest(path, on_bad_sample=configs.OnBadSample("skip"))


def test_samples_that_lose_every_trained_token_are_dropped_and_counted(
    tmp_path, caplog
):
    rows = [row("word " * 300)] * 12 + [row()] * 38
    path = write(tmp_path / "data.jsonl", *rows)
    dataset = ingest(path)
    assert len(dataset.samples) == 38
    assert dataset.samples.trained.any()
    assert (dataset.samples.num_trained > 0).all()
    summaries.log_dataset(dataset, name="training", max_length=64)
    assert "12 of 50 samples have no trained token after truncation to 64" in (
        caplog.text
    )


def test_a_dataset_that_loses_every_trained_token_is_an_error(tmp_path):
    path = write(tmp_path / "data.jsonl", *[row("word " * 300)] * 3)
    with pytest.raises(
        errors.DataError,
        match="3 of 3 samples have no trained token after truncation to 64; raise max",
    ):
        ingest(path)


def test_overlong_samples_are_cut_dropped_or_an_error(tmp_path):
    path = write(tmp_path / "data.jsonl", row(), row("q", "word " * 100))
    cut = ingest(path)
    assert cut.samples.lengths.max() == 64
    assert cut.counts.truncated == 1
    dropped = ingest(path, overlong=configs.Overlong("drop"))
    assert dropped.samples.sample_ids.tolist() == [0]
    assert dropped.counts.overlong == 1
    with pytest.raises(errors.DataError, match=r"data\.jsonl:2: \d+ tokens, max_len"):
        ingest(
            path,
            overlong=configs.Overlong("error"),
            on_bad_sample=configs.OnBadSample("skip"),
        )


def test_each_file_has_its_own_format_and_says_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    one = write(tmp_path / "one.jsonl", row(), row())
    two = write(tmp_path / "two.jsonl", {"instruction": "q", "output": "a"})
    dataset = ingest(one, two)
    assert dataset.counts.formats == ("messages", "alpaca")
    assert dataset.samples.sample_ids.tolist() == [0, 1, 2]
    assert "two.jsonl: format alpaca (found by its columns)" in caplog.text
    with pytest.raises(errors.DataError, match=r"two\.jsonl:1: missing field: 'messag"):
        ingest(two, format="messages")


def test_400_nulls_before_a_string_do_not_fix_a_type(tmp_path):
    rows = [{"instruction": "q", "input": None, "output": "a"}] * 400
    path = write(tmp_path / "data.jsonl", *rows, {**rows[0], "input": "text"})
    assert len(ingest(path).samples) == 401


def test_data_without_an_end_of_turn_is_said(tmp_path, caplog):
    bare = chat_tokenizers.chatml("{% for m in messages %}{{ m.content }}{% endfor %}")
    settings = configs.DatasetConfig()
    renderer = rendering.Renderer(bare, settings, max_length=64)
    path = write(tmp_path / "data.jsonl", row(), row())
    dataset = ingestion.ingest([path], renderer, settings)
    summaries.log_dataset(dataset, name="training", max_length=64)
    assert "2 of 2 samples end without an end-of-turn" in caplog.text


def test_digest_depends_on_content_only(tmp_path):
    path = tmp_path / "data.jsonl"
    digests = []
    line = json.dumps(row()).encode()
    for data in (line + b"\n" + line, b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line):
        path.write_bytes(data)
        digests.append(ingest(str(path)).digest)
    path.write_bytes(line)
    assert digests[0] == digests[1] != ingest(str(path)).digest


def test_the_shown_sample_marks_its_trained_tokens(tmp_path):
    path = write(tmp_path / "data.jsonl", row("what", "that"))
    dataset = ingest(path)
    encoder = rendering.Renderer(
        TOKENIZER, configs.DatasetConfig(), max_length=64
    ).encoder
    assert summaries.show_mask(dataset, encoder, index=0) == (
        "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n"
        ">>>that<|im_end|><<<\n"
    )
