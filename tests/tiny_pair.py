"""Where the bundled pair lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = ROOT / "model_specs" / "tiny"
TINY_SPEC = TINY / "gemma4_tiny.yaml"
TINY_TARGET = TINY / "gemma4-tiny-q8_0.gguf"
TINY_DRAFT = TINY / "gemma4-tiny-assistant-q8_0.gguf"
