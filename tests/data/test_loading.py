import collections
import json
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mtuner_jax import configs
from mtuner_jax.data import errors, files, loading, pipelines
from tests.data import chat_tokenizers

TOKENIZER = chat_tokenizers.chatml()


def write(tmp_path, num=20, name="data.jsonl"):
    path = tmp_path / name
    rows = [
        {"instruction": f"say {i}", "output": "word " * (i % 7 + 1)} for i in range(num)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def config(path, *, dataset=None, **kwargs):
    kwargs = {"max_length": 96, **kwargs}
    return configs.RunConfig(
        dataset=configs.DatasetConfig(path=(path,), **(dataset or {})), **kwargs
    )


def load(run, **kwargs):
    return loading.load(run, TOKENIZER, global_batch_size=4, **kwargs)


def predictions(batches):
    """Every trained prediction: its document, position, token and target."""
    found = collections.Counter()
    for batch in batches:
        trained = batch.weights > 0
        fields = (batch.sample_ids, batch.positions, batch.input_ids, batch.targets)
        found.update(zip(*(field[trained].tolist() for field in fields), strict=True))
    return found


def test_packing_changes_rows_and_not_what_is_learned(tmp_path):
    path = write(tmp_path)
    data = {p: load(config(path, packing=p)).train for p in (True, False)}
    assert data[True].steps_per_epoch < data[False].steps_per_epoch == 5
    epochs = {
        p: [next(train) for _ in range(train.steps_per_epoch)]
        for p, train in data.items()
    }
    assert predictions(epochs[True]) == predictions(epochs[False])


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_overlong_samples_go_the_same_way_packed_or_not(tmp_path, overlong):
    path = write(tmp_path)
    seen = []
    for packing in (True, False):
        dataset = {"overlong": configs.Overlong(overlong)}
        run = config(path, max_length=64, packing=packing, dataset=dataset)
        train = load(run).train
        seen.append(predictions(next(train) for _ in range(train.steps_per_epoch)))
    assert seen[0] == seen[1]


def test_held_out_samples_are_evaluated_and_not_trained(tmp_path):
    data = load(config(write(tmp_path), val_size=0.25), eval_batch_size=3)
    trained = predictions(next(data.train) for _ in range(data.train.steps_per_epoch))
    evaluated = predictions(data.eval)
    train_ids, eval_ids = ({key[0] for key in p} for p in (trained, evaluated))
    assert len(eval_ids) == 5
    assert train_ids | eval_ids == set(range(20))
    assert not train_ids & eval_ids
    assert next(iter(data.eval)).input_ids.shape == (3, 96)


def test_an_evaluation_file(tmp_path):
    other = write(tmp_path, 7, "eval.jsonl")
    data = load(config(write(tmp_path), eval_dataset=(other,)))
    assert len({key[0] for key in predictions(data.eval)}) == 7
    assert data.eval.batch_size == 4
    assert load(config(other)).eval is None


def test_ids_of_samples_do_not_depend_on_order_packing_or_length(tmp_path):
    path = write(tmp_path)
    texts = []
    for kwargs in ({}, {"seed": 1}, {"packing": False}, {"max_length": 72}):
        train = load(config(path, **kwargs)).train
        first = {}
        for _ in range(train.steps_per_epoch):
            batch = next(train)
            for sample_id in np.unique(batch.sample_ids[batch.segment_ids > 0]):
                place = (batch.sample_ids == sample_id) & (batch.segment_ids > 0)
                first[int(sample_id)] = batch.input_ids[place][:30].tolist()
        texts.append(first)
    assert texts[0] == texts[1] == texts[2] == texts[3]


RESUME = """
import json, sys
import transformers
from mtuner_jax import configs
from mtuner_jax.data import loading
path, tokenizer, packing, state, steps = json.load(sys.stdin)
run = configs.RunConfig(
    dataset=configs.DatasetConfig(path=(path,)), max_length=96, packing=packing
)
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
train = loading.load(run, tokenizer, global_batch_size=4).train
train.set_state(state)
batches = [[field.tolist() for field in next(train)[:6]] for _ in range(steps)]
print(json.dumps([batches, train.get_state(), train.epoch]))
"""


def run_process(*args):
    root = pathlib.Path(__file__).parents[2]
    got = subprocess.run(
        [sys.executable, "-c", RESUME],
        input=json.dumps(args),
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert got.returncode == 0, got.stderr
    return json.loads(got.stdout)


@pytest.mark.parametrize("packing", [True, False])
def test_a_new_process_goes_on_where_the_old_one_stopped(tmp_path, packing):
    # known-bugs E1: 20 samples, stop after step 3 of epoch 2.
    path, tokenizer = write(tmp_path), str(tmp_path / "tokenizer")
    TOKENIZER.save_pretrained(tokenizer)
    train = load(config(path, packing=packing)).train
    for _ in range(train.steps_per_epoch + min(3, train.steps_per_epoch - 1)):
        next(train)
    state = train.get_state()
    got = run_process(path, tokenizer, packing, state, 12)
    batches = [[field.tolist() for field in next(train)[:6]] for _ in range(12)]
    assert got == [batches, train.get_state(), train.epoch]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("global_batch_size", {}),
        ("max_length", {"max_length": 95}),
        ("packing", {"packing": False}),
        ("seed", {"seed": 1}),
        ("val_size", {"val_size": 0.1}),
        ("dataset.train_on", {"dataset": {"train_on": configs.TrainOn.ALL}}),
        ("dataset.overlong", {"dataset": {"overlong": configs.Overlong.DROP}}),
    ],
)
def test_resuming_with_another_setting_names_it(tmp_path, name, kwargs):
    path = write(tmp_path)
    state = json.loads(json.dumps(load(config(path)).train.get_state()))
    rows = 8 if name == "global_batch_size" else 4
    run = config(path, **kwargs)
    other = loading.load(run, TOKENIZER, global_batch_size=rows).train
    with pytest.raises(errors.DataError, match=rf"no use: {name} was .*, is "):
        other.set_state(state)


def test_resuming_with_other_data_or_tokenizer_names_it(tmp_path):
    state = load(config(write(tmp_path))).train.get_state()
    other = load(config(write(tmp_path, 21))).train
    with pytest.raises(errors.DataError, match=r"no use: dataset was"):
        other.set_state(state)
    run = config(write(tmp_path))
    llama = loading.load(run, chat_tokenizers.llama3(), global_batch_size=4)
    with pytest.raises(errors.DataError, match=r"tokenizer was .*chat_template was"):
        llama.train.set_state(state)


def test_tiny_data_with_packing_makes_a_step_and_says_what_is_padding(tmp_path, caplog):
    # known-bugs B3: 3 samples, max_length 2048, batch 8.
    run = config(write(tmp_path, 3), max_length=2048)
    train = loading.load(run, TOKENIZER, global_batch_size=8).train
    assert train.steps_per_epoch == 1
    assert next(train).weights.any(axis=1).tolist() == [True] + [False] * 7
    assert "fills 1 rows and global_batch_size is 8: 7 rows" in caplog.text


def test_the_log_says_what_the_data_is_like(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    load(config(write(tmp_path), val_size=2))
    text = caplog.text
    assert "20 samples read" in text
    assert "% of them trained" in text
    assert "% filled" in text
    assert ">>>word <|im_end|><<<" in text
    assert "evaluation: 2 samples, 1 batches" in text


def test_plain_data_needs_no_template(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    bare = chat_tokenizers.chatml(None)
    train = loading.load(config(str(path)), bare, global_batch_size=1).train
    assert next(train).weights.sum() == 2


def test_the_shipped_set_is_found_from_any_folder_and_fits_the_default_run(tmp_path):
    code = "from mtuner_jax.data import loading; print(loading.shipped_path())"
    root = pathlib.Path(__file__).parents[2]
    got = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = list(files.read(got.stdout.strip()))
    assert 300 <= len(lines) <= 500
    data = load(configs.RunConfig(max_length=1024))
    assert isinstance(data.train, pipelines.TrainData)
    assert data.dataset.counts.read == len(lines)
    assert not data.dataset.counts.skipped


def test_the_shipped_set_is_made_the_same_way_each_time(tmp_path):
    root = pathlib.Path(__file__).parents[2]
    outputs = []
    for seed in ("0", "1"):
        path = tmp_path / f"{seed}.jsonl"
        subprocess.run(
            [sys.executable, root / "scripts/make_dataset.py", "--output", path],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        outputs.append(path.read_bytes())
    assert outputs[0] == outputs[1]
    rows = [json.loads(line) for line in outputs[0].splitlines()]
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(set(answers)) == len(answers) >= 300
    assert max(map(len, answers)) <= 260
    assert (tmp_path / "0.LICENSE.md").read_text().count("PSF-2.0") == 1


def test_tokens_without_a_row_are_told_of_evaluation_files_too(tmp_path):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "a", "completion": "b"}\n')
    bad.write_text('{"prompt": "a", "completion": "<|x|>"}\n')
    tokenizer = chat_tokenizers.chatml()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<|x|>"])
    for train, held_out in ((good, bad), (bad, good)):
        run = configs.RunConfig(
            dataset=configs.DatasetConfig(path=(str(train),)),
            eval_dataset=(str(held_out),),
        )
        with pytest.raises(
            errors.DataError, match=rf"bad.jsonl:1: .*'<\|x\|>'.*{rows}"
        ):
            loading.load(run, tokenizer, global_batch_size=1, num_rows=rows)


def test_files_have_weights_that_repeat_or_thin_out_their_samples(tmp_path):
    one, two = write(tmp_path, 20, "one.jsonl"), write(tmp_path, 11, "two.jsonl")

    def epoch(*weights, val_size=0, seed=42):
        run = configs.RunConfig(
            dataset=configs.DatasetConfig(path=(one, two), weights=weights),
            max_length=96,
            val_size=val_size,
            seed=seed,
        )
        data = loading.load(run, TOKENIZER, global_batch_size=4)
        return collections.Counter(data.train.rows.samples.tolist()), data

    counts, data = epoch(0.5, 2.25)
    first = [counts[i] for i in range(20)]
    second = [counts[i] for i in range(20, 31)]
    assert set(first) <= {0, 1} and 5 <= sum(first) <= 15
    assert set(second) <= {2, 3} and 22 <= sum(second) <= 26
    assert epoch(0.5, 2.25)[0] == counts != epoch(0.5, 2.25, seed=1)[0]
    held_out = set(epoch(0.5, 2.25, val_size=6)[1].eval.rows.samples.tolist())
    assert len(held_out) == 6
    assert not held_out & set(epoch(0.5, 2.25, val_size=6)[0])
    assert data.train.fingerprint()["dataset.weights"] == "0.5,2.25"
    with pytest.raises(errors.DataError, match=r"has 1 entries, dataset\.path 2"):
        epoch(2.0)
    with pytest.raises(errors.DataError, match="leave no sample"):
        epoch(0.0, 0.0)


def test_reading_stops_after_max_samples(tmp_path):
    run = config(write(tmp_path), dataset={"max_samples": 3})
    data = loading.load(run, TOKENIZER, global_batch_size=1)
    assert data.dataset.samples.sample_ids.tolist() == [0, 1, 2]


def test_samples_are_shown_with_what_carries_loss(tmp_path):
    run = config(write(tmp_path), show_samples=2)
    shown = list(loading.show(run, TOKENIZER))
    assert len(shown) == 2
    assert shown[1].endswith("assistant\n>>>word word <|im_end|><<<\n")


def test_columns_without_a_use_are_named_once(tmp_path, caplog):
    path = tmp_path / "data.jsonl"
    row = '{"prompt": "a", "completion": "b", "source": "x"}\n'
    path.write_text(row * 3)
    with caplog.at_level(logging.INFO):
        loading.load(config(str(path)), TOKENIZER, global_batch_size=1)
    assert caplog.text.count("not used: column 'source' of 3 rows") == 1


def test_the_answers_of_a_split_conversation_stay_on_one_side_of_val_size(
    tmp_path, caplog
):
    turns = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps({'messages': turns})}\n" * 10)
    caplog.set_level(logging.WARNING)
    run = config(str(path), val_size=3)
    tokenizer = chat_tokenizers.chatml(chat_tokenizers.REWRITING)
    data = loading.load(run, tokenizer, global_batch_size=4)
    assert "10 conversations became a sample for each answer" in caplog.text
    assert data.eval is not None
    rows = data.dataset.samples.sample_ids
    kept, held_out = (
        rows[part.rows.samples].tolist() for part in (data.train, data.eval)
    )
    assert len(held_out) == 6 and len(set(held_out)) == 3
    assert len(kept) == 14 and not set(kept) & set(held_out)


def test_a_changed_date_or_treatment_of_messages_is_named_on_resume(tmp_path):
    path = write(tmp_path)
    before = load(config(path)).train
    changed = {
        "template_date": "2025-01-02",
        "reasoning": configs.Reasoning.DROP,
        "special_tokens_in_content": True,
    }
    after = load(config(path, dataset=changed)).train
    for name in changed:
        assert f"dataset.{name}" not in before.fingerprint()
        assert f"dataset.{name}" in after.fingerprint()
    with pytest.raises(errors.DataError, match="template_date was None, is 2025-01-02"):
        after.set_state(before.get_state())
