"""Products of matrices as stored, run on the CPU from their template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from templates_on_cpu import TemplatesOnCpu

from cpp_on_cpu import compiler
from memra_compiler.ir.types import TensorType
from memra_compiler.ops.cuda import ARCHS
from memra_compiler.ops.cuda_layouts import a8_quantise, a8_reference
from memra_compiler.ops.cuda_linear import PlainParams, linear_launches
from memra_compiler.ops.formats import dequantise, random_bytes

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


@pytest.mark.parametrize(
    ("format", "kind", "outputs", "inputs", "shared"),
    [
        ("f32", "f32", 24, 2816, True),  # a router
        ("q4_0", "a8", 8, 64, True),
        ("q8_0", "f32", 16, 8192, False),  # more than registers hold
        ("f32", "f32", 640, 32, False),  # enough outputs
    ],
)
def test_plain_product(
    format: str, kind: str, outputs: int, inputs: int, shared: bool, tmp_path: Path
) -> None:
    """Against float64; a row has the same bits in any company, and no other is written."""
    rng, most = np.random.default_rng(outputs), 6
    w, arch = TensorType((outputs, inputs), format, "plain"), ARCHS["sm_90a"]
    launches = linear_launches(arch, TensorType((most, inputs), kind), [w], ())
    (params,) = (launch.params for launch in launches)
    assert isinstance(params, PlainParams)
    assert params.shared == shared
    stored, run = random_bytes(w, rng), TemplatesOnCpu(launches, tmp_path)
    x = rng.standard_normal((most, inputs)).astype(np.float32)
    values = x.astype(np.float64)
    if kind == "a8":
        q, d = a8_quantise(x)
        values = q * np.repeat(d.astype(np.float64), 32, 1)
    whole = np.empty(0)
    for rows in (most, 5, 1):
        out = np.full((8, outputs), np.nan, np.float32)
        run(rows, a8_reference(x[:rows]) if kind == "a8" else x, stored, out)
        assert np.isnan(out[rows:]).all()
        whole = out if rows == most else whole
        np.testing.assert_array_equal(out[:rows], whole[:rows])
    matrix = dequantise(stored, w)
    sizes = np.abs(values) @ np.abs(matrix).T
    assert float(np.max(np.abs(whole[:most] - values @ matrix.T) / sizes)) < 1e-6
