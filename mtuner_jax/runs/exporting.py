"""Files for other programs: an adapter, a merged model, a GGUF file."""

import logging
import pathlib
from typing import Any

from mtuner_jax.checkpoints import (
    folders,
    gguf_export,
    gguf_import,
    gguf_vocabularies,
    hf_export,
    json_files,
    merging,
    model_export,
)
from mtuner_jax.configs import ConfigError, ExportConfig
from mtuner_jax.runs import choosing
from mtuner_jax.runs.choosing import Chosen
from mtuner_jax.runs.families import Family
from mtuner_jax.weights import sources

_logger = logging.getLogger(__name__)
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f16": "float16"}


def export(config: ExportConfig, family: Family) -> pathlib.Path:
    """Writes what was asked for; returns the folder or file.

    Raises:
      ConfigError: Nothing to be written, or a dtype that the format has not.
      UserError: As the readers and writers.
    """
    output = pathlib.Path(config.output).expanduser()
    folders.check_writable(output, name="output")
    chosen = choosing.choose(config, family)
    dtype = _dtype(config)
    if config.format == "peft":
        _write_adapter(output, chosen, dtype=dtype, readers=config.readers)
        return output
    base: Any = chosen.opened.source
    source: sources.TensorSource = base
    if chosen.trained is None:
        _logger.warning("no run and no adapter: the base model is written as it is")
    else:
        trained = chosen.trained
        source = merging.Merged(base, trained.adapters, trained.specs)
    if config.format == "gguf":
        return _write_gguf(output, chosen, _named(source, chosen), dtype=dtype)
    _write_merged(output, chosen, source, dtype=dtype, size=config.max_shard_size)
    return output


def _dtype(config: ExportConfig) -> str:
    if config.dtype == "auto":
        return "float32" if config.format == "peft" else "bfloat16"
    dtype = _ALIASES.get(config.dtype, config.dtype)
    allowed = gguf_export.DTYPES if config.format == "gguf" else model_export.DTYPES
    if dtype not in allowed:
        raise ConfigError(
            f"dtype={config.dtype!r}: one of {', '.join(allowed)} for {config.format}"
        )
    return dtype


def _write_adapter(
    output: pathlib.Path, chosen: Chosen, *, dtype: str, readers: str
) -> None:
    trained = chosen.trained
    if trained is None:
        raise ConfigError("format='peft' writes an adapter: give run or adapter")
    parts = (trained.adapters, trained.specs, trained.config)
    scalings = {s for spec in trained.specs for s in spec.scalings if s}
    ranks = {r for spec in trained.specs for r in spec.ranks if r}
    if readers == "all":
        parts = hf_export.portable(trained.adapters, trained.specs)
    elif len(scalings) > 1 or len(ranks) > 1 or trained.config.use_rslora:
        _logger.warning(
            "this adapter has patterns or rsLoRA: PEFT reads it rightly, vLLM and "
            "llama.cpp scale it wrongly; --readers all writes one that all read"
        )
    options = hf_export.AdapterOptions(
        base_name=chosen.opened.name, dtype=dtype, tokenizer=chosen.opened.tokenizer
    )
    hf_export.write_adapter(output, *parts, options=options)


def _write_merged(
    output: pathlib.Path,
    chosen: Chosen,
    source: sources.TensorSource,
    *,
    dtype: str,
    size: str,
) -> None:
    opened = chosen.opened
    generation: dict[str, Any] = {}
    if opened.path.is_dir():
        hf = json_files.read(opened.path / "config.json")
        file = opened.path / "generation_config.json"
        generation = json_files.read(file) if file.is_file() else {}
    else:
        hf = opened.shape.to_hf()
    if not generation:
        ids = {name: _id(opened.tokenizer, name) for name in ("bos", "eos", "pad")}
        generation = {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    model_export.write_model(
        output,
        source,
        opened.shape.tensors(),
        hf,
        options=model_export.ModelOptions(
            dtype=dtype,
            max_shard_size=size,
            tokenizer=opened.tokenizer,
            generation=generation,
        ),
    )


def _id(tokenizer: Any, name: str) -> int | None:
    return getattr(tokenizer, f"{name}_token_id")


def _write_gguf(
    output: pathlib.Path, chosen: Chosen, source: sources.TensorSource, *, dtype: str
) -> pathlib.Path:
    opened = chosen.opened
    name = opened.name.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    file = output
    if output.suffix != ".gguf":
        file = output / f"{name}-{dtype}.gguf"
    if file.exists():
        raise ConfigError(f"output: {file} is there already; choose another output")
    vocabulary = (
        gguf_vocabularies.of_file(gguf_import.GgufFile(opened.path))
        if opened.path.is_file()
        else gguf_vocabularies.of_tokenizer(
            opened.tokenizer, num_rows=opened.shape.vocab_size
        )
    )
    hf = opened.shape.to_hf()
    gguf_export.write(file, source, hf, vocabulary, dtype=dtype, name=name)
    return file


class _Named:
    """The tensors that the shape names: files may hold a tied head, too."""

    def __init__(self, source: sources.TensorSource, names: list[str]):
        self._source, self._names = source, names

    def infos(self) -> dict[str, sources.TensorInfo]:
        infos = self._source.infos()
        return {name: infos[name] for name in self._names}

    def read(self, name: str, box: sources.Box) -> Any:
        return self._source.read(name, box)


def _named(source: sources.TensorSource, chosen: Chosen) -> _Named:
    return _Named(source, [tensor.name for tensor in chosen.opened.shape.tensors()])
