"""CUDA text of a function that TVM has scheduled: TVM writes the body, all around it is ours.

The passes are listed one by one, as for the CPU (`codegen/cpu.py`): a kernel is launched by our own
lists, so there is no host code to make, and NVRTC compiles what is written here with our flags.
"""

from __future__ import annotations

import re
import threading
from functools import cache
from typing import Any

from memra_compiler.codegen.c_text import fuse, tidy, wrap
from memra_compiler.ops.cuda import Argument, Scheduled
from memra_compiler.ops.scheduled import thread_extents

WIDTH = 100
WARP = 32
#: Threads of an innermost axis are neighbours: a block is one row of threads, launched as such.
_AXES = ("x", "y", "z")
_LOCK = threading.Lock()


@cache
def cuda_text(launch: Scheduled) -> str:
    """The source of a launch, its symbol `KERNEL_SYMBOL`."""
    extents = thread_extents(launch.function.body)
    body = _body(_lowered(launch.function))
    if launch.block % WARP == 0:  # every thread of a warp meets: guards are those of whole blocks
        body = [line.replace("__activemask()", "0xffffffffu") for line in body]
    lines = [
        f"// {launch.summary}",
        f"// Scheduled by TVM: memra_schedules/{launch.rule}.py.",
        *_headers(launch.arguments),
        '#include "launch.cuh"',
        "",
        f'extern "C" __global__ void __launch_bounds__({launch.block}) KERNEL_SYMBOL(',
        *_signature(launch.arguments),
        ") {",
        "  launch_dependents();",
        "  wait_for_predecessor();",
        *_indices(extents, body),
        *_guards(extents),
        *body,
        "}",
    ]
    return "\n".join(wrapped for line in lines for wrapped in wrap(line, WIDTH)) + "\n"


def _lowered(function: Any) -> str:
    """What TVM's code generator prints."""
    import tvm
    from tvm import s_tir, tirx

    S, T = s_tir.transform, tirx.transform
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80", "max_num_threads": 1024}, "llvm")
    passes = [
        T.BindTarget(target),
        S.LowerCrossThreadReduction(),
        S.LowerInitBlock(),
        S.PlanAndUpdateBufferAllocationLocation(),
        S.ConvertBlocksToOpaque(),
        S.LiftThreadBinding(),
        S.StmtSimplify(),
        S.CompactBufferAllocation(),
        S.UnifyThreadBinding(),
        S.LowerOpaqueBlock(),
        T.FlattenBuffer(),
        T.NarrowDataType(32),
        S.LoopPartition(),
        T.VectorizeLoop(True),
        S.HoistIfThenElse(),
        S.RenormalizeSplitPattern(),
        T.StmtSimplify(),
        T.RemoveNoOp(),
        S.RewriteUnsafeSelect(),
        S.ThreadSync("shared"),
        S.LowerThreadAllreduce(),
        T.AnnotateEntryFunc(),
        T.SplitHostDevice(),
    ]
    module = tvm.ir.transform.Sequential(passes)(tvm.IRModule({"main": function}))
    kernels = {v: f for v, f in module.functions.items() if f.attrs.get("calling_conv") == 2}
    assert len(kernels) == 1, "a schedule binds every loop nest to one launch"
    finish = [T.LowerWarpMemory(), T.StmtSimplify(), T.LowerIntrin()]
    module = tvm.ir.transform.Sequential(finish)(tvm.IRModule(kernels))
    return _printed(module, target)


def _printed(module: Any, target: Any) -> str:
    """The text of a lowered module.

    Where there is a GPU, TVM would compile it at once, with its own flags and without our headers:
    it is given an empty text, and no compiler.
    """
    import tvm
    from tvm_ffi.registry import remove_global_func

    taken: list[str] = []

    def take(code: str, *_: Any) -> str:
        taken.append(str(code))
        return ""

    hooks = {"tvm_callback_cuda_postproc": take, "tvm_callback_cuda_compile": lambda code: b""}
    with _LOCK:
        found = {name: tvm.get_global_func(name, allow_missing=True) for name in hooks}
        for name, hook in hooks.items():
            tvm.register_global_func(name, hook, override=True)
        try:
            tvm.get_global_func("target.build.cuda")(module, target)
        finally:
            for name, function in found.items():
                if function is None:
                    remove_global_func(name)
                else:
                    tvm.register_global_func(name, function, override=True)
    return taken[0]


def _body(text: str) -> list[str]:
    """The statements of the kernel, in our spelling."""
    kernel = text[text.rindex("__global__") :]
    body = kernel[kernel.index("{") + 1 : kernel.rindex("}")].strip("\n")
    body = re.sub(r"\(\(int\)(block|thread)Idx\.([xyz])\)", r"\1_\2", body)
    body = re.sub(r"\b(\w+)_ptr(_\d+)?\b", r"\1\2", body)
    body = re.sub(r"\buint\b", "unsigned", body)
    body = re.sub(r"alignas\(64\) ", "alignas(16) ", body)
    body = re.sub(r"(-?)(0x[0-9a-f.]+p[+-]\d+)(f?)/\*[^*]*\*/", _decimal, body)
    body = re.sub(r"\b\d+\.\d{15}\b", lambda match: repr(float(match[0])), body)
    lines = [line.rstrip() for line in body.splitlines() if line.strip()]
    return [fuse(tidy(line)) for line in lines]


def _decimal(match: re.Match[str]) -> str:
    """A literal that reads back the same, where TVM prints hexadecimal."""
    import numpy as np

    value = float.fromhex(match[1] + match[2])
    text = str(np.float32(value)) if match[3] else repr(value)
    return text + match[3] if any(c in text for c in ".en") else f"{text}.0{match[3]}"


def _headers(arguments: tuple[Argument, ...]) -> list[str]:
    """Headers of the formats that a kernel reads."""
    types = " ".join(argument.c_type for argument in arguments)
    known = {"__nv_bfloat16": "<cuda_bf16.h>", "__half": "<cuda_fp16.h>"}
    found = [header for type, header in known.items() if type in types]
    found += sorted({f'"{argument.header}"' for argument in arguments if argument.header})
    return [f"#include {header}" for header in found]


def _signature(arguments: tuple[Argument, ...]) -> list[str]:
    lines = ["    int rows,"]
    for argument in arguments:
        comma = "" if argument is arguments[-1] else ","
        lines.append(f"    {argument.c_type} {argument.name}{comma}  // {argument.shape}")
    return lines


def _indices(extents: list[tuple[str, Any]], body: list[str]) -> list[str]:
    """Names of the block and thread indices in use."""
    text = "\n".join(body)
    sizes = {axis: str(extent) for axis, extent in extents}
    lines = []
    for axis in _AXES:
        if f"block_{axis}" in text or f"blockIdx.{axis}" in sizes:
            lines.append(f"  const int block_{axis} = blockIdx.{axis};")
    wide = sizes.get("threadIdx.x", "1")
    if "threadIdx.y" in sizes:
        lines.append(f"  const int thread_x = threadIdx.x % {wide};")
        lines.append(f"  const int thread_y = threadIdx.x / {wide};")
    elif "threadIdx.x" in sizes:
        lines.append("  const int thread_x = threadIdx.x;")
    return lines


def _guards(extents: list[tuple[str, Any]]) -> list[str]:
    """The grid covers the most rows there can be: blocks beyond the last row have nothing to do."""
    lines = []
    for axis, extent in dict(extents).items():
        limit = str(extent).replace("//", "/")
        if axis.startswith("blockIdx") and "rows" in limit:
            lines += [f"  if (block_{axis[-1]} >= {limit}) {{", "    return;", "  }"]
    return lines
