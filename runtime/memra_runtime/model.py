"""Load an artifact with its weights: every check first, then one model ready to run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memra_runtime.artifact import Manifest, WeightEntry, load_manifest
from memra_runtime.checkpoint import (
    Binding,
    Checkpoint,
    Expectation,
    WantedTensor,
    bind,
    check_arch,
    check_finite,
    check_metadata,
    open_checkpoint,
)
from memra_runtime.device import Device, Progress
from memra_runtime.device.memory import available_memory, gib, kib, refuse_more
from memra_runtime.errors import Diagnostic, MemraError, fail
from memra_runtime.tokenizer import Tokenizer, check_pairing, load_tokenizer
from memra_runtime.trim import HeadTrim, make_trim

#: Sections of the spec by the source their weights come from.
SECTIONS = {"target": "target", "draft": "drafter"}
#: What binds the map of a head that is trimmed in the drafter's file.
HEAD_MAP = "drafter.d2t"


@dataclass(frozen=True)
class Model:
    """A loaded pipeline."""

    manifest: Manifest
    device: Device
    tokenizer: Tokenizer
    bindings: dict[str, Binding]
    #: The drafter's head, where it is trimmed; a session that is given it learns.
    trim: HeadTrim | None = None


@dataclass(frozen=True)
class Opened:
    """An artifact and two weight files that belong together; no tensor has been read yet."""

    folder: Path
    manifest: Manifest
    files: dict[str, Checkpoint]
    tokenizer: Tokenizer
    bindings: dict[str, Binding]
    device: Callable[..., Device]


@dataclass(frozen=True)
class MemoryPlan:
    """What loading will take, in bytes, known before anything is loaded.

    The memory is this machine's, or that of the GPU named `gpu`, where repacking takes a `staging`
    buffer beside arena and weights. `resident` is what the process holds already.
    """

    arena: int
    weights: int
    resident: int
    available: int | None
    staging: int = 0
    gpu: str = ""

    @property
    def need(self) -> int:
        """What must be free for loading to succeed."""
        return self.arena + self.weights + self.staging

    @property
    def peak(self) -> int:
        """What is held at most: the process (CPU), or the artifact's part of a GPU."""
        return self.need + self.resident


def plan_memory(manifest: Manifest) -> MemoryPlan:
    """The memory a model needs, beside what this process holds already and what is free.

    Raises: MemraError where it needs a GPU and there is none.
    """
    if manifest.target.startswith("cuda:"):
        from memra_runtime.device.cuda_driver import Context

        gpu = Context()
        return MemoryPlan(
            manifest.arena_bytes, manifest.weight_bytes, 0, gpu.free_memory(),
            manifest.staging_bytes, gpu.name,
        )  # fmt: skip
    return MemoryPlan(
        manifest.arena_bytes,
        manifest.weight_bytes,
        kib("/proc/self/status", "VmRSS:") or 0,
        available_memory(),
    )


def held_memory(plan: MemoryPlan) -> int | None:
    """What was taken since `plan` was made: of the GPU now, else by this process at its largest.

    None where it is not known. Of a GPU, other processes' changes are counted, too.
    """
    if plan.gpu:
        from memra_runtime.device.cuda_driver import Context

        return (plan.available or 0) - Context().free_memory()
    return kib("/proc/self/status", "VmHWM:")


def refuse_memory(plan: MemoryPlan) -> None:
    """Refuse a model that does not fit, with the numbers."""
    if plan.available is not None and plan.need > plan.available:
        staging = f", {gib(plan.staging)} to repack them" if plan.staging else ""
        where = f" on {plan.gpu}" if plan.gpu else ""
        fail(
            "memory",
            f"the model needs {gib(plan.need)} (arena {gib(plan.arena)}, weights "
            f"{gib(plan.weights)}{staging}), {gib(plan.available)} are free{where}",
            hints=("lower `runtime.max_context` in the spec, or use smaller weights",),
        )


def open_model(
    folder: Path, target: Path, draft: Path, *, odd: Callable[[MemraError], None] | None = None
) -> Opened:
    """Open an artifact and its two weight files and check that they belong together.

    Checks, in this order: artifact, processor, architectures, metadata, tokenizers, tensors.
    Only headers are read. Raises: MemraError. With `odd`, metadata and tokenizers that do not fit
    are told to it instead: text would make no sense, but its speed can be measured.
    """
    manifest = load_manifest(folder)
    check_processor(manifest, folder)
    device = device_class(manifest, folder)
    files = {"target": open_checkpoint(target), "draft": open_checkpoint(draft)}
    check_archs(manifest, files)
    tokenizer, drafts = (load_tokenizer(files[source]) for source in ("target", "draft"))

    def judge(check: Callable[[], None]) -> None:
        try:
            check()
        except MemraError as error:
            if odd is None:
                raise
            odd(error)

    judge(lambda: check_facts(manifest, files))
    judge(lambda: check_pairing(tokenizer, drafts))
    bindings = {source: bind_source(manifest, source, file) for source, file in files.items()}
    return Opened(folder, manifest, files, tokenizer, bindings, device)


def load_opened(opened: Opened, *, graphs: bool = True, progress: Progress | None = None) -> Model:
    """Load what `open_model` checked, if there is memory for it and no scale is NaN.

    `graphs=False` launches kernel by kernel, where there are graphs to do without (CUDA).

    Raises: MemraError.
    """
    manifest, files, bindings = opened.manifest, opened.files, opened.bindings
    refuse_memory(plan_memory(manifest))
    for source, file in files.items():
        bound = bindings[source]
        check_finite(file, list(bound.tensors.values()))
    trim = head_trim(opened)
    weights = [
        trim.rows.reshape(-1)
        if trim is not None and entry.of_rows
        else weight_data(entry, files, bindings)
        for entry in manifest.weights
    ]
    options = {} if manifest.target == "cpu" else {"graphs": graphs, "progress": progress}
    device = opened.device(manifest, opened.folder, weights, **options)
    if trim is not None:
        trim.install(device)
    return Model(manifest, device, opened.tokenizer, bindings, trim)


def head_trim(opened: Opened) -> HeadTrim | None:
    """The drafter's head, where it is trimmed. Raises: MemraError for a bad map or sidecar."""
    manifest, files = opened.manifest, opened.files
    if manifest.head is None:
        return None
    weight = next(w for w in manifest.weights if w.id == manifest.head.weight)
    tensor = opened.bindings[weight.source][weight.id]
    draft = opened.bindings["draft"]
    return make_trim(
        manifest, opened.folder, tensor, files[weight.source].data(tensor.name),
        draft.tensors.get(HEAD_MAP), files["draft"],
    )  # fmt: skip


def another_model(model: Model) -> Model:
    """The same loaded weights and code with planes of their own: one more text at a time.

    Raises: MemraError where there is no memory for another arena.
    """
    refuse_more(
        f"another text beside those on `{model.manifest.name}`",
        model.manifest.arena_bytes,
        model.device.free(),
        "end another session, or lower `runtime.max_context` in the spec and compile again",
    )
    device = model.device.another()
    if model.trim is not None:
        model.trim.install(device)
    return replace(model, device=device)


def device_class(manifest: Manifest, folder: Path) -> Callable[..., Device]:
    """The kind of device that an artifact was compiled for. Raises: MemraError."""
    try:
        if manifest.target == "cpu":
            from memra_runtime.device.cpu import CpuDevice

            return CpuDevice
        from memra_runtime.device.cuda import CudaDevice
    except ImportError as error:
        fail(
            "target",
            f"the artifact was compiled for `{manifest.target}`, which needs `{error.name}`",
            str(folder),
            hints=('pip install "memra[cuda]"',),
        )
    return CudaDevice


def load_model(folder: Path, target: Path, draft: Path) -> Model:
    """Open and load an artifact with its two weight files. Raises: MemraError."""
    return load_opened(open_model(folder, target, draft))


def check_processor(manifest: Manifest, folder: Path) -> None:
    """Refuse an artifact for another kind of device or for instructions this CPU lacks."""
    if manifest.target.startswith("cuda:"):
        return  # the GPU is looked at when the device is made
    if manifest.target != "cpu":
        fail(
            "target",
            f"the artifact is for `{manifest.target}`, this runtime runs `cpu` and `cuda`",
            str(folder),
        )
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return
    present = set(path.read_text(encoding="ascii", errors="replace").split())
    missing = [f for f in manifest.cpu_features[1:] if f not in present]
    if missing:
        fail(
            "target",
            f"the artifact was compiled for {manifest.cpu}; this CPU lacks {', '.join(missing)}",
            str(folder),
            hints=("compile the spec on this machine",),
        )


def check_archs(manifest: Manifest, files: dict[str, Checkpoint]) -> None:
    """Check the architectures of both files against the spec."""
    others = {"target": files["draft"], "draft": files["target"]}
    for source, file in files.items():
        section = SECTIONS[source]
        arch = str(manifest.spec[section]["arch"])
        check_arch(file, arch, f"{section}.arch", other=others[source])


def check_facts(manifest: Manifest, files: dict[str, Checkpoint]) -> None:
    """Check the metadata of both files against the spec.

    Raises: MemraError with all that differs.
    """
    problems: list[Diagnostic] = []
    for source, file in files.items():
        expected = [
            Expectation(
                e.keys, list(e.value) if isinstance(e.value, tuple) else e.value, e.spec_path
            )
            for e in manifest.expect
            if e.source == source
        ]
        try:
            check_metadata(file, expected)
        except MemraError as error:
            problems += error.diagnostics
    if problems:
        raise MemraError(tuple(problems))


def bind_source(manifest: Manifest, source: str, file: Checkpoint) -> Binding:
    """Bind every tensor of a file, in the formats the artifact was compiled for."""
    wanted = [
        WantedTensor(
            w.id, w.names, (w.of_rows or w.shape[0], *w.shape[1:]), w.format, _makes(w, file),
            w.stacked,
        )
        for w in manifest.weights
        if w.source == source
    ]  # fmt: skip
    head = manifest.head
    if head is not None and head.map_names and source == "draft":
        wanted.append(WantedTensor(HEAD_MAP, head.map_names, (head.ranked,)))
    ignored = {e.pattern: e.reason for e in manifest.ignore if e.source == source}
    return bind(file, wanted, ignored=ignored)


def _makes(entry: WeightEntry, file: Checkpoint) -> bool:
    """Whether a tensor the file lacks may be made: ones, or what its layout never carries."""
    return bool(entry.made) and (file.kind == "safetensors" or entry.made[0] == "ones")


def weight_data(
    entry: WeightEntry, files: dict[str, Checkpoint], bindings: dict[str, Binding]
) -> npt.NDArray[np.uint8]:
    """Stored bytes of a weight: in place in the mapped file, or made by its recipe."""
    binding = bindings[entry.source]
    if entry.id in binding:
        return files[entry.source].data(binding[entry.id].name)
    return make_weight(entry)


def make_weight(entry: WeightEntry) -> npt.NDArray[np.uint8]:
    """Make a weight that a file does not carry."""
    recipe, *arguments = entry.made
    if recipe == "ones":
        return stored_floats(np.ones(entry.shape, np.float32), entry.format)
    if recipe != "rope_factors":
        raise ValueError(f"unknown recipe {recipe}")
    factors = np.full(math.prod(entry.shape), 1e30, np.float32)
    factors[: int(arguments[0])] = 1.0
    return factors.view(np.uint8)


def stored_floats(values: npt.NDArray[np.float32], format: str) -> npt.NDArray[np.uint8]:
    """The bytes of floats in the format f32, f16 or bf16 (by cutting bits off)."""
    if format == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype({"f16": np.float16, "f32": np.float32}[format]).view(np.uint8)
