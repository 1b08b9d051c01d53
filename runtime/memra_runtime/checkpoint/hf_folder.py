"""Read a Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from memra_runtime.checkpoint.core import Checkpoint
from memra_runtime.checkpoint.formats import TensorInfo
from memra_runtime.checkpoint.mapped import MappedFile
from memra_runtime.checkpoint.safetensors_file import parse_json, read_safetensors
from memra_runtime.errors import fail

_MAX_JSON = 64 << 20
#: Where a multimodal config and its `text_config` both have a key, the outer one says what the
#: model is and how a text ends; for every other key the text part describes itself.
_OUTER_WINS = frozenset(
    {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version",
     "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
)  # fmt: skip


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file. Raises: MemraError if it is absent, huge or damaged."""
    try:
        if path.stat().st_size > _MAX_JSON:
            fail("weights-damaged", f"`{path.name}` is too large to be a config", str(path))
        text = path.read_bytes()
    except OSError as error:
        fail("weights-unreadable", f"`{path.name}` cannot be read: {error.strerror}", str(path))
    return parse_json(text, f"`{path.name}`", str(path))


def flatten(config: dict[str, object]) -> dict[str, object]:
    """Lay `text_config` over the outer config; null never hides a value."""
    text = config.get("text_config")
    merged = dict(config)
    if not isinstance(text, dict):
        return merged
    for key, value in text.items():
        outer = config.get(key)
        if outer is None or (key not in _OUTER_WINS and value is not None):
            merged[key] = value
    return merged


def read_folder(folder: Path) -> Checkpoint:
    """Open the model in a folder; headers are read, tensors are mapped.

    Raises: MemraError for a missing config or shard, or a damaged file.
    """
    config_path = folder / "config.json"
    if not config_path.exists():
        weights = sorted(p.name for p in folder.iterdir() if p.suffix in (".gguf", ".safetensors"))
        ggufs = [name for name in weights if name.endswith(".gguf")]
        hints = (f"give one of its GGUF files: {', '.join(ggufs[:8])}",) if ggufs else ()
        fail(
            "weights-config",
            f"folder `{folder.name}` has no config.json",
            str(folder),
            notes=(f"weight files in it: {', '.join(weights[:8]) or 'none'}",),
            hints=hints or ("copy config.json from the model's page beside the weights",),
        )
    config = read_json(config_path)
    arch = config.get("model_type")
    if not isinstance(arch, str):
        fail(
            "weights-config",
            "`model_type` is missing in config.json",
            str(config_path),
            hints=("is this the model's own config.json (not a tokenizer's or a pipeline's)?",),
        )
    index = folder / "model.safetensors.index.json"
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, tuple[int, int]] = {}
    files: list[MappedFile] = []
    header = [config_path.read_bytes()]
    with ExitStack() as on_error:
        owners = _owners(index) if index.exists() else {}
        for shard in _shards(folder, owners):
            file = MappedFile(shard)
            on_error.callback(file.close)
            entries, raw = read_safetensors(file)
            for name, (info, offset) in entries.items():
                if owners.get(name, shard.name) != shard.name:
                    continue  # the index says that another shard has the one that counts
                if name in tensors:
                    other = files[places[name][0]].path.name
                    _bad(folder, f"tensor `{name}` is in both `{other}` and `{shard.name}`")
                tensors[name], places[name] = info, (len(files), offset)
            files.append(file)
            header.append(raw)
        for name, owner in owners.items():
            if name not in tensors:
                _bad(index, f"it says that `{owner}` has tensor `{name}`, which it has not")
        on_error.pop_all()
    return Checkpoint(
        folder, "safetensors", arch, flatten(config), tensors, files, places, b"".join(header)
    )


def _owners(index: Path) -> dict[str, str]:
    """Return tensor name -> shard name from the index."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        _bad(index, "it has no `weight_map`")
    owners: dict[str, str] = {}
    for name, shard in mapping.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            _bad(index, f"`{shard}` (for tensor `{name}`) is not the name of a file beside it")
        owners[name] = shard
    return owners


def _shards(folder: Path, owners: dict[str, str]) -> Iterator[Path]:
    if not owners:
        single = folder / "model.safetensors"
        if not single.exists():
            others = sorted(
                p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")
            )
            fail(
                "weights-not-found",
                f"folder `{folder.name}` has no model.safetensors (nor its index.json)",
                str(folder),
                notes=(f"other weight files: {', '.join(others[:8])}",) if others else (),
                hints=("Memra reads safetensors; convert PyTorch `.bin` files first",),
            )
        yield single
        return
    names = sorted(set(owners.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        fail(
            "weights-not-found",
            f"{len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:8])}",
            str(folder / "model.safetensors.index.json"),
            hints=("fetch them into the same folder",),
        )
    yield from (folder / name for name in names)


def _bad(path: Path, what: str) -> NoReturn:
    fail(
        "weights-damaged",
        f"`{path.name}` does not fit its weight files: {what}",
        str(path),
        hints=("fetch the whole folder again from one place",),
    )
