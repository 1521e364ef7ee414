import json
import resource
import signal
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.checkpoints import metas, step_dirs, store
from mtuner_jax.protocols import states

META = metas.RunMeta(
    base_model={"config": "ab12", "tensors": "cd34"},
    data={"fingerprint": "ef56", "global_batch_size": 8},
    lora={"r": 4, "target_modules": ("q_proj", "v_proj")},
    seed=42,
    rng={"impl": "threefry2x32"},
)


def mesh_of(num_devices):
    return jax.make_mesh(
        (num_devices,),
        ("tier0",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:num_devices],
    )


def place(state, num_devices):
    """Every array of two dims sharded over its rows, the others replicated."""
    mesh = mesh_of(num_devices)
    specs = jax.tree.map(lambda x: P("tier0") if x.ndim == 2 else P(), state)
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs
    )


def random_state(seed, step=3):
    rng = np.random.default_rng(seed)
    adapters = {
        name: {
            "lora_a": rng.standard_normal((16, 4)).astype(np.float32),
            "lora_b": rng.standard_normal((8, 16)).astype(jnp.bfloat16),
        }
        for name in ("q_proj", "v_proj")
    }
    # Values that a detour over another dtype or over text would change.
    adapters["q_proj"]["lora_a"][0] = [np.nan, -0.0, np.inf, 1e-45]
    opt_state = optax.adamw(1e-3).init(jax.tree.map(jnp.asarray, adapters))
    return states.TrainState(adapters, opt_state, np.int32(step))


def assert_bit_equal(got, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("saved_on", "restored_on"), [(8, 8), (8, 4), (8, 1), (1, 8)])
def test_restore_on_another_number_of_devices_is_bit_equal(
    tmp_path, saved_on, restored_on
):
    state = place(random_state(0), saved_on)
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(state, step=3, data={"next": [1, 2]}, meta=META)
    asked = store.abstract_like(place(random_state(1), restored_on))
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        restored = checkpoints.restore(tmp_path / "3", asked, meta=META)
    assert (restored.step, restored.data) == (3, {"next": [1, 2]})
    assert_bit_equal(restored.state, state)
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(
        lambda x: x.sharding, asked
    )


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    state = place({"a": jnp.arange(1 << 20, dtype=jnp.float32).reshape(-1, 8)}, 8)
    want = jax.tree.map(lambda x: np.array(x, copy=True), state)
    overwrite = jax.jit(lambda s: {"a": s["a"] * 0 - 1}, donate_argnums=0)
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(state, step=1, data={}, meta=META)
        state = jax.block_until_ready(overwrite(state))
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        abstract = store.abstract_like(state)
        got = checkpoints.restore(tmp_path / "1", abstract, meta=META).state
    assert_bit_equal(got, want)


def test_the_newest_checkpoints_are_kept_and_foreign_things_are_not_touched(tmp_path):
    foreign = ["9", "notes", "7.orbax-checkpoint-tmp-123"]
    for name in foreign:
        (tmp_path / name).mkdir()
    with store.Store(tmp_path, save_total_limit=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(random_state(step), step=step, data={}, meta=META)
            checkpoints.poll()
    assert {entry.name for entry in tmp_path.iterdir()} == {"3", "4", *foreign}


def test_a_step_is_written_once(tmp_path):
    with store.Store(tmp_path, save_total_limit=2) as checkpoints:
        checkpoints.save(random_state(0), step=1, data={"first": True}, meta=META)
        checkpoints.save(random_state(1), step=1, data={"first": False}, meta=META)
    data = json.loads((tmp_path / "1" / "data" / "metadata").read_text())
    assert data == {"first": True}


def test_an_incomplete_folder_in_the_way_is_renamed_not_deleted(tmp_path, caplog):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "precious").write_text("x")
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(random_state(0), step=5, data={}, meta=META)
    assert (tmp_path / "5.aside-0" / "precious").exists()
    assert step_dirs.scan(tmp_path).complete == (5,)
    assert "is in the way of a new one: renamed to 5.aside-0" in caplog.text


def test_going_on_from_an_earlier_step_sets_later_ones_aside(tmp_path):
    state = place(random_state(0), 8)
    with store.Store(tmp_path, save_total_limit=9) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state, step=step, data={}, meta=META)
    with store.Store(tmp_path, save_total_limit=9) as checkpoints:
        checkpoints.restore(tmp_path / "1", store.abstract_like(state), meta=META)
        checkpoints.save(state, step=2, data={"again": 1}, meta=META)
    assert step_dirs.scan(tmp_path).complete == (1, 2)
    assert {"2.aside-0", "3.aside-0"} < {entry.name for entry in tmp_path.iterdir()}


def test_the_adapter_is_part_of_the_checkpoint(tmp_path):
    def write(folder):
        (folder / "adapter_config.json").write_text("{}")

    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(
            random_state(0), step=1, data={}, meta=META, write_adapter=write
        )
    assert (tmp_path / "1" / "adapter" / "adapter_config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 7}, "seed was 42, now 7 is asked for"),
        (
            {"lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}},
            "lora.r was 4, now 8",
        ),
        ({"base_model": {"config": "00"}}, "base model is another one: its config"),
        ({"data": "other"}, r'data was \{.*\}, now "other"'),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_field(tmp_path, changed, message):
    state = place(random_state(0), 8)
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(state, step=1, data={}, meta=META)
        other = metas.RunMeta(**{**vars(META), **changed})
        checkpoints.poll()
    with (
        store.Store(tmp_path, save_total_limit=1) as checkpoints,
        pytest.raises(metas.CheckpointMismatch, match=message),
    ):
        checkpoints.restore(tmp_path / "1", store.abstract_like(state), meta=other)


def test_other_shapes_and_dtypes_are_refused_not_cast(tmp_path):
    state = place(random_state(0), 8)
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(state, step=1, data={}, meta=META)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    with (
        store.Store(tmp_path, save_total_limit=1) as checkpoints,
        pytest.raises(
            metas.CheckpointMismatch,
            match=r"\['lora_a'\]: saved float32\[16,4\], asked bfloat16",
        ),
    ):
        checkpoints.restore(tmp_path / "1", store.abstract_like(narrow), meta=META)


@pytest.fixture
def small_files():
    """No file may grow beyond 100 kB, as on a disk that runs full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_failed_background_save_surfaces_and_leaves_the_older_one(
    tmp_path, small_files
):
    noise = np.random.default_rng(0).standard_normal((1 << 16, 8)).astype(np.float32)
    checkpoints = store.Store(tmp_path, save_total_limit=1)
    checkpoints.save({"a": jnp.ones((8, 8))}, step=1, data={}, meta=META)
    checkpoints.save({"a": jnp.asarray(noise)}, step=2, data={}, meta=META)
    with pytest.raises(
        store.SaveError, match=r"2 could not be written.*older checkpoint"
    ):
        checkpoints.close()
    assert step_dirs.newest(tmp_path) == tmp_path / "1"


KILLED = """
    import os, signal, sys
    import jax, jax.numpy as jnp
    jax.config.update("jax_platforms", "cpu")
    from mtuner_jax.checkpoints import metas, store
    meta = metas.RunMeta(base_model="m", data="d", lora={}, seed=1, rng={})
    checkpoints = store.Store(sys.argv[1], save_total_limit=3)
    checkpoints.save({"a": jnp.full((1 << 22,), 1.0)}, step=1, data={}, meta=meta)
    checkpoints.save({"a": jnp.full((1 << 22,), 2.0)}, step=2, data={}, meta=meta)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_a_save_leaves_a_checkpoint_to_resume_from(tmp_path):
    script = textwrap.dedent(KILLED)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    path = step_dirs.newest(tmp_path)
    assert path is not None
    meta = metas.RunMeta(base_model="m", data="d", lora={}, seed=1, rng={})
    asked = store.abstract_like(place({"a": jnp.zeros((1 << 22,))}, 1))
    with store.Store(tmp_path, save_total_limit=3) as checkpoints:
        restored = checkpoints.restore(path, asked, meta=meta)
    assert (np.asarray(restored.state["a"]) == float(path.name)).all()


def test_what_json_cannot_hold_is_an_error_at_once(tmp_path):
    with (
        store.Store(tmp_path, save_total_limit=1) as checkpoints,
        pytest.raises(TypeError, match="bytes is not JSON serializable"),
    ):
        checkpoints.save(random_state(0), step=1, data={"x": b"y"}, meta=META)
