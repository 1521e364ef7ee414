"""Writes docs/configuration.md from the config dataclasses."""

import pathlib

from mtuner_jax import configs
from mtuner_jax.settings import config_fields

PATH = pathlib.Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

<!-- Written by scripts/config_reference.py; change the docstrings, not this file. -->

Settings come from a YAML file, from flags, or both:

```
python scripts/train.py --config run.yaml --mesh pcie8 --learning_rate 1e-4 --lora.r 16
```

```yaml
model: /models/Llama-3.1-8B
learning_rate: 1e-4
lora:
  r: 16
  target_modules: [q_proj, v_proj]
dataset:
  path: [chats.jsonl]
```

- A flag wins over the file, the file over the defaults below. `null` in the file means
  "not set". Flags are the dotted names of the tables; `-` and `_` are the same.
- Lists: `--dataset.path a.jsonl b.jsonl`, `a.jsonl,b.jsonl` or `[a.jsonl, b.jsonl]`.
  Booleans: `--packing`, `--packing=false`. Maps: `--lora.rank_pattern '{.*q_proj: 8}'`.
- The file is YAML 1.2: `1e-4` is a number, and `no` and `on` are words, not booleans.
- An unknown name is an error that tells the nearest one, and the file and line.
- Also understood: `model_name_or_path` (`model`), `warmup_ratio` (`warmup_steps` below
  1), and `dataset: file.jsonl` (`dataset.path`).
- `--print_config` prints the resulting settings as YAML and exits. A run writes the
  same to `config.yaml` in its folder, which `--config` reads again.

"""


def text() -> str:
    """The page as it should be now."""
    return INTRODUCTION + config_fields.markdown(configs.RunConfig)


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text(), encoding="utf-8")
    print(f"wrote {PATH}")
