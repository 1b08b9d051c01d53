"""Specs that must be refused: edits of a good spec, and where each error must point.

The full text of each report is in tests/golden/spec/NAME.txt. After a change of wording, run
`python tests/spec/bad_specs.py` from the root and review the difference.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from memra_compiler.spec import load_spec
from memra_runtime.errors import MemraError, Position

ROOT = Path(__file__).resolve().parents[2]
GOOD = (ROOT / "model_specs" / "tiny" / "gemma4_tiny.yaml").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden" / "spec"
LAYERS = "layers: [swa, swa, swa, swa, swa, full]"
SWA_READER = (
    "          heads: 4\n          head_dim: 64\n          window: 128\n          scale: 1.0\n"
)


@dataclass(frozen=True)
class Bad:
    """One bad spec: `edits` on the good one (or `text` instead of it), and what is expected.

    `at` lists code@line:column of every diagnostic, in order; `@` alone means no line.
    """

    name: str
    at: tuple[str, ...]
    edits: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def spec(self) -> str:
        text = GOOD if self.text is None else self.text
        for old, new in self.edits:
            assert old in text, f"{self.name}: nothing to edit: {old!r}"
            text = text.replace(old, new, 1)
        return text

    def report(self, folder: Path) -> MemraError:
        """Load the spec from inside `folder`, so that messages name it `spec.yaml`."""
        for name, text in {"good.yaml": GOOD, **self.files, "spec.yaml": self.spec()}.items():
            (folder / name).write_text(text, encoding="utf-8")
        before = Path.cwd()
        os.chdir(folder)
        try:
            load_spec("spec.yaml", overrides=self.overrides)
        except MemraError as error:
            return error
        finally:
            os.chdir(before)
        raise AssertionError(f"{self.name}: the spec was accepted")


def places(error: MemraError) -> tuple[str, ...]:
    """Return code@line:column of every diagnostic."""
    found = []
    for item in error.diagnostics:
        at = f"{item.place.line}:{item.place.column}" if isinstance(item.place, Position) else ""
        found.append(f"{item.code}@{at}")
    return tuple(found)


def edit(name: str, old: str, new: str, *at: str) -> Bad:
    return Bad(name, at, ((old, new),))


def whole(name: str, text: str, *at: str) -> Bad:
    return Bad(name, at, text=text)


BAD = [
    # --- YAML ---
    whole("empty", "", "yaml@"),
    whole("only_a_comment", "# nothing\n", "yaml@"),
    whole("a_list", "- memra\n", "yaml@1:1"),
    whole("a_word", "memra\n", "yaml@1:1"),
    whole("two_documents", "memra: 1\n---\nmemra: 1\n", "yaml@2:1"),
    whole("control_character", "memra: 1\nname: a\x01\n", "yaml@2:8"),
    edit("tab", "  width: 256", "\twidth: 256", "yaml@11:1"),
    edit("unclosed_list", "concat: [target_embed, carry]}", "concat: [target_embed, carry}",
         "yaml@56:39"),
    edit("tag", "width: 256", "width: !!int 256", "yaml@11:10"),
    edit("undefined_alias", "width: 256", "width: *w", "yaml@11:10"),
    edit("duplicate_key", "  width: 256", "  width: 256\n  width: 257", "duplicate-key@12:3"),
    Bad("merge_key", ("merge-key@14:3",),
        (("target:\n", "target: &t\n"), ("  embed: {", "  <<: *t\n  embed: {"))),
    # --- fields ---
    edit("unknown_field", "kv_heads: 2", "kvheads: 2", "unknown-field@23:11"),
    edit("unknown_section", "runtime:", "run_time:", "unknown-field@98:1"),
    edit("missing_fields", "  vocab: 4096\n  width: 256\n", "", "missing-field@6:1"),
    edit("missing_section", "round:\n  depth", "target_x:\n  depth",
         "missing-field@1:1", "unknown-field@90:1"),
    edit("text_for_number", "vocab: 4096", "vocab: many", "wrong-type@10:10"),
    edit("underscore_in_number", "vocab: 4096", "vocab: 4_096", "wrong-type@10:10"),
    edit("exponent_for_whole_number", "vocab: 4096", "vocab: 4e3", "wrong-type@10:10"),
    edit("yes_is_text", "tied: true", "tied: yes", "wrong-type@15:16"),
    edit("bool_for_number", "norm_eps: 1e-6", "norm_eps: true", "wrong-type@13:13"),
    edit("number_for_section", "embed: {scale: sqrt_width}", "embed: 5", "wrong-type@14:10"),
    edit("infinity", "softcap: 30.0", "softcap: .inf", "out-of-range@15:31"),
    edit("zero_softcap", "softcap: 30.0", "softcap: 0", "out-of-range@15:31"),
    edit("depth_too_large", "max: 5", "max: 16", "out-of-range@92:10"),
    edit("odd_head_dim", "head_dim: 64", "head_dim: 63", "out-of-range@24:21"),
    edit("near_value", "act: gelu_tanh", "act: gelu", "unknown-value@31:39"),
    edit("near_scale", "scale: sqrt_width", "scale: sqrt_with", "unknown-value@14:18"),
    edit("unknown_format", "embed: q8_0", "embed: q5_0", "unknown-value@9:34"),
    edit("bad_name", "name: gemma4_tiny", "name: my model", "out-of-range@4:7"),
    edit("null_value", "width: 256", "width: null", "wrong-type@11:10"),
    # --- kinds ---
    edit("unknown_mixer", "attention:", "attenton:", "unknown-kind@21:9"),
    edit("two_ffns", "ffn: {gated: {width: 1024, act: gelu_tanh}}",
         "ffn: {gated: {width: 1024, act: gelu_tanh}, gated_: {}}", "unknown-kind@31:51"),
    edit("no_ffn", "ffn: {gated: {width: 1024, act: gelu_tanh}}", "ffn: {}", "kind@31:12"),
    edit("ffn_without_fields", "ffn: {gated: {width: 1024, act: gelu_tanh}}", "ffn: gated",
         "wrong-type@31:12"),
    edit("unknown_drafter", "kind: chained", "kind: chain", "unknown-kind@50:9"),
    edit("drafter_without_kind", "kind: chained", "kynd: chained", "missing-field@49:1"),
    # --- not supported yet ---
    edit("mla", "ffn: {gated: {width: 1024, act: gelu_tanh}}", "ffn: {mla: {ranks: 8}}",
         "not-supported@31:13"),
    edit("draft_experts", "ffn: {gated: {width: 256, act: gelu_tanh}}", "ffn: {moe: {experts: 4, "
         "active: 2, expert_width: 32, dense_width: 256, act: gelu_tanh}}", "not-supported@74:13"),
    edit("nextn", "kind: chained", "kind: nextn", "not-supported@50:9"),
    edit("sampled", "accept: greedy", "accept: sampled", "not-supported@96:11"),
    edit("int4", "activations: auto", "activations: int4", "unknown-value@102:16"),
    # --- rules inside a section ---
    edit("active_experts", "ffn: {gated: {width: 1024, act: gelu_tanh}}", "ffn: {moe: {experts: 4, "
         "active: 5, expert_width: 32, dense_width: 256, act: gelu_tanh}}", "conflict@31:39"),
    edit("trim", "head: {tied: true}", "head: {tied: true, trim: {spare: 512}}",
         "missing-field@59:22"),
    edit("trim_sidecar", "head: {tied: true}",
         "head: {tied: true, trim: {ranks: r.txt, spare: 0, sidecar: true}}", "conflict@59:62"),
    edit("trim_and_map", "head: {tied: true}",
         "head: {tied: false, trim: {ranks: r.txt}, map: {rows: 64, kind: offset}}",
         "conflict@59:29"),
    edit("trim_of_clusters", "head: {tied: true}",
         "head: {tied: true, trim: {ranks: r.txt}, centroids: {count: 64, active: 4}}",
         "conflict@59:28"),
    edit("tied_map", "head: {tied: true}", "head: {tied: true, map: {rows: 64, kind: absolute}}",
         "conflict@59:27"),
    edit("table_of_another_width", "head: {tied: true}", "head: {tied: true, table: target}",
         "conflict@59:29"),
    Bad("gate_of_fixed_depths", ("conflict@95:28",),
        (("policy: accepted_plus_one", "policy: fixed"), ("next_round: 0.0", "next_round: 0.5"))),
    edit("nothing_to_skip", "{when: never}", "{when: always}, first: may_skip", "conflict@95:66"),
    edit("threshold_that_never_cuts", "{when: never}", "{threshold: 0.0, when: always}",
         "out-of-range@95:55"),
    edit("kv_heads", "kv_heads: 2", "kv_heads: 3", "conflict@23:21"),
    edit("fraction", "fraction: 0.25", "fraction: 0.3", "conflict@44:39"),
    edit("undeclared_layer", LAYERS, "layers: [swa, sw, full]", "unknown-kind@47:17"),
    edit("undeclared_layer_in_period", LAYERS, "layers: {repeat: [swa, full, foo], times: 3}",
         "unknown-kind@47:32"),
    edit("unused_kind", LAYERS, "layers: [swa, swa]", "conflict@33:5"),
    edit("no_layers", LAYERS, "layers: []", "out-of-range@47:11"),
    edit("no_periods", LAYERS, "layers: {repeat: [swa, full], times: 0}", "out-of-range@47:40"),
    edit("suppressed_tokens", "suppress_tokens: []", "suppress_tokens: [7, 5000]",
         "conflict@15:58"),
    edit("suppressed_twice", "suppress_tokens: []", "suppress_tokens: [7, 7]", "conflict@15:58"),
    edit("floor_above_max", "short: 1", "short: 6", "conflict@94:20"),
    edit("concat", "concat: [target_embed, carry]", "concat: [carry]", "conflict@56:19"),
    edit("centroids_active", "head: {tied: true}",
         "head: {tied: true, centroids: {count: 64, active: 65}}", "conflict@59:53"),
    edit("pre_norm_carry", "from: target.hidden_post_norm", "from: target.hidden_pre_norm",
         "unknown-value@57:17"),
    # --- rules between sections ---
    edit("unknown_arch", "arch: gemma4\n", "arch: gema4\n", "unknown-value@7:9"),
    edit("drafter_as_target", "arch: gemma4\n", "arch: gemma4-assistant\n", "unknown-value@7:9"),
    edit("kv_target_unknown", "last_own(swa)", "last_own(sww)", "conflict@72:22"),
    edit("kv_target_form", "last_own(swa)", "swa", "out-of-range@72:22"),
    edit("kv_target_wrong_kind", "last_own(swa)", "last_own(full)", "conflict@72:22"),
    edit("drafter_head_dim", SWA_READER, SWA_READER.replace("64", "32"), "conflict@67:21"),
    edit("drafter_heads", SWA_READER, SWA_READER.replace("heads: 4", "heads: 3"), "conflict@66:18"),
    edit("drafter_window", SWA_READER, SWA_READER.replace("128", "64"), "conflict@68:19"),
    edit("drafter_rope", "q_norm: rms\n          rope: {base: 1e4}",
         "q_norm: rms\n          rope: {base: 1e5}", "conflict@71:24"),
    edit("centroids_uneven", "head: {tied: true}",
         "head: {tied: true, centroids: {count: 48, active: 4}}", "conflict@59:41"),
    edit("per_layer_input_alone", "act: gelu_tanh}}\n",
         "act: gelu_tanh}}\n      per_layer_input: {act: gelu_tanh}\n", "conflict@32:7"),
    edit("per_layer_embed_unread", "embed: {scale: sqrt_width}",
         "embed: {scale: sqrt_width}\n  per_layer_embed: {width: 32}", "conflict@15:3"),
    edit("per_layer_drafter", "ffn: {gated: {width: 256, act: gelu_tanh}}\n",
         "ffn: {gated: {width: 256, act: gelu_tanh}}\n      per_layer_input: {act: gelu_tanh}\n",
         "conflict@75:7"),
    edit("visible_rows_of_target", LAYERS, """  tail:
      norms: sandwich
      mixer: {query_attention: {heads: 4, head_dim: 64, window: 128, scale: 1.0,
        rope: {base: 1e4}, kv_target: last_own(swa), visible_rows: window_plus_1}}
      ffn: {gated: {width: 64, act: silu}}
  layers: [swa, swa, swa, swa, full, tail]""", "conflict@50:68"),
    edit("format_blocks", "  formats: {matrix: q8_0, embed: q8_0, norm: f32}\n  width: 128",
         "  formats: {matrix: q8_0, embed: q6_k, norm: f32}\n  width: 128", "conflict@53:34"),
    Bad("cache_blocks", ("conflict@100:7",),
        (("head_dim: 64", "head_dim: 80"), ("head_dim: 64", "head_dim: 80"),
         ("kv: f32", "kv: q8_0"))),
    edit("context_too_long", "max_context: 2048", "max_context: 9000", "conflict@99:16"),
    edit("context_too_short", "max_context: 2048", "max_context: 6", "conflict@99:16"),
    # --- auto ---
    edit("auto_without_weights", "width: 256", "width: auto", "auto@11:10"),
    edit("auto_where_it_cannot_be", "positions: anchored", "positions: auto",
         "unknown-value@58:14"),
    # --- version, extends, overrides ---
    edit("future_version", "memra: 1", "memra: 2", "version@3:8"),
    edit("no_version", "memra: 1\n", "", "version@1:1"),
    whole("extends_nothing", "memra: 1\nextends: base.yaml\n", "extends@2:10"),
    whole("extends_itself", "memra: 1\nextends: spec.yaml\n", "extends@2:10"),
    Bad("extends_in_a_circle", ("extends@2:10",), text="memra: 1\nextends: a.yaml\n",
        files={"a.yaml": "memra: 1\nextends: spec.yaml\n"}),
    whole("error_in_a_child", "memra: 1\nextends: good.yaml\ntarget:\n  head: {softcap: -1}\n",
          "out-of-range@4:19"),
    whole("deleted_field", "memra: 1\nextends: good.yaml\ntarget: {vocab: null}\n",
          "missing-field@3:1"),
    Bad("error_in_a_base", ("out-of-range@92:10",), text="memra: 1\nextends: base.yaml\n",
        files={"base.yaml": GOOD.replace("max: 5", "max: 50")}),
    Bad("overrides", ("set@", "set@", "set@", "unknown-kind@", "unknown-field@", "wrong-type@"),
        overrides={"memra": "2", "round..depth": "1", "runtime.kv": "[f16", "target.width": "wide",
                   "target.wdth": "3", "target.layers.1": "sw"}),
    # --- several at once ---
    Bad("many", ("unknown-value@7:9", "wrong-type@11:10", "conflict@23:21", "unknown-kind@47:17",
                 "missing-field@56:3", "unknown-value@100:7"),
        (("arch: gemma4\n", "arch: llama\n"), ("width: 256", "width: wide"),
         ("kv_heads: 2", "kv_heads: 3"), ("[swa, swa, swa, swa", "[swa, sw, swa, swa"),
         ("concat: [target_embed, carry]", ""), ("kv: f32", "kv: f8"))),
]  # fmt: skip


def main() -> None:
    """Write every golden text anew and remove those without a case."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for bad in BAD:
        with tempfile.TemporaryDirectory() as folder:
            error = bad.report(Path(folder))
        (GOLDEN / f"{bad.name}.txt").write_text(f"{error}\n", encoding="utf-8")
        if places(error) != bad.at:
            print(f"{bad.name}: expected {bad.at}, got {places(error)}", file=sys.stderr)


if __name__ == "__main__":
    main()
