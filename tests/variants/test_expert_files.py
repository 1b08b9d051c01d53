"""Experts as files spell them, and what a few rows of them cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from expert_files import VARIANT, ExpertFile
from golden_support import step_logits
from variant_models import DRAFTS, PROMPT
from variant_support import SPECS, check_rows, check_speculative_text, fixed_session, read_golden

from memra_compiler.compile import CompileOptions, compile_spec
from memra_runtime.artifact import Manifest, load_manifest
from memra_runtime.bench.costs import cost
from memra_runtime.checkpoint import open_checkpoint
from memra_runtime.device import Device
from memra_runtime.device.cpu import CpuDevice
from memra_runtime.model import bind_source, check_facts, weight_data

IDS = VARIANT.prompt()
#: GGUF files say which pairs turn by their `rope_freqs` alone.
FRACTION = {"target.layer_kinds.full.mixer.attention.rope.fraction": "0.25"}
INT8 = {"runtime.activations": "int8"}


class Bench:
    """Compiles the variant on files that are written as they are asked for."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.draft = VARIANT.write_draft(folder / "draft")
        self.made = 0

    def compile(self, file: ExpertFile, **overrides: str) -> tuple[Path, Path]:
        """The artifact and the target's file; `overrides` are by path in the spec."""
        self.made += 1
        target = file.write(self.folder / f"{self.made}.gguf")
        options = CompileOptions("cpu", target, self.draft, FRACTION | overrides, self.cache)
        output = self.folder / f"{self.made}.cpu.memra"
        return compile_spec(SPECS / "26b.yaml", output, options).folder, target

    def device(self, file: ExpertFile, **overrides: str) -> Device:
        """The variant on a file, loaded but for the tokenizer that the file lacks."""
        artifact, target = self.compile(file, **overrides)
        manifest = load_manifest(artifact)
        files = {"target": open_checkpoint(target), "draft": open_checkpoint(self.draft)}
        check_facts(manifest, files)
        bindings = {source: bind_source(manifest, source, f) for source, f in files.items()}
        weights = [weight_data(entry, files, bindings) for entry in manifest.weights]
        return CpuDevice(manifest, artifact, weights)

    def manifest(self, **overrides: str) -> Manifest:
        return load_manifest(self.compile(ExpertFile(), **overrides)[0])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("experts"), kernel_cache)


def logits(device: Device) -> np.ndarray:
    return step_logits(fixed_session(device, 0), IDS)[0]


@pytest.mark.parametrize("split", [False, True])
def test_gguf_equals_transformers(bench: Bench, split: bool) -> None:
    check_rows(bench.device(ExpertFile(split)), read_golden("26b"), 6)


def test_fused_and_split_experts_have_the_same_bits_in_int8(bench: Bench) -> None:
    fused, split = (
        bench.device(ExpertFile(split, matrices="Q8_0"), **INT8) for split in (False, True)
    )
    assert logits(fused).tobytes() == logits(split).tobytes()
    check_speculative_text(split, IDS[:PROMPT], (DRAFTS,))


def test_scales_that_were_folded_are_ones(bench: Bench) -> None:
    folded, ones = ExpertFile(scaled=False), ExpertFile(scales=1.0)
    assert logits(bench.device(folded)).tobytes() == logits(bench.device(ones)).tobytes()


def test_a_verify_reads_no_more_experts_than_there_are(bench: Bench) -> None:
    """Two rows touch 6 of 8 experts, three rows all: bytes are no straight line."""
    wide = bench.manifest()
    for rows in (2, 3):
        narrow = bench.manifest(**{"round.depth.max": str(rows - 1)})
        assert cost(wide, "verify", rows, 40) == cost(narrow, "verify", rows, 40)
