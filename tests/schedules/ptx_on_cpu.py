"""Run a kernel on the CPU from the PTX that NVRTC makes of it: what its optimiser did is in there.

Every instruction becomes a call of the function of its name in `ptx_on_cpu.h`, every register a
variable; threads, barriers and shuffles are those of `cuda_on_cpu.h`. Instructions that no test
needed yet do not compile.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

from cuda_on_cpu import HERE

import cpp_on_cpu
from memra_compiler.codegen.cuda import load_nvrtc, nvrtc_options, render
from memra_compiler.ops.base import Array
from memra_compiler.ops.cuda import AnyLaunch, CudaArch

TYPES = {
    **{f"{sign}{bits}": f"{'u' * (sign != 's')}int{bits}_t"
       for sign in "sub" for bits in (8, 16, 32, 64)},
    "f32": "float", "f16": "Half", "bf16": "Brain", "pred": "bool",
}  # fmt: skip
#: Of these, C++ has made keywords.
KEYWORDS = ("and", "or", "xor", "not")


def ptx_of(source: str, name: str, arch: CudaArch) -> str:
    """The PTX of a kernel, with the options of all kernels."""
    nvrtc = load_nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    options = [option.encode() for option in nvrtc_options(arch)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(error) == 0, f"{name} does not compile"
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode().strip("\0")


class Translation:
    """One kernel as a C++ function of the values of its parameters.

    `dynamic` bytes of shared memory come with a launch; they lie first.
    """

    def __init__(self, ptx: str, dynamic: int = 0) -> None:
        head, _, body = ptx[ptx.index(".entry") :].partition("{")
        self.symbol = head.split()[1].rstrip("(")
        self.parameters = re.findall(r"\w+_param_\d+", head)
        unsized = re.findall(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\]", ptx)
        self.shared: dict[str, int] = dict.fromkeys(unsized, 0)
        self.shared_bytes = dynamic
        self.registers: list[str] = []
        body = re.sub(r"//.*", "", body[: body.rindex("}")])
        found = [
            self._statement(s.lstrip("{} \t\n").rstrip()) for s in re.split(r";|(?<=:)\n", body)
        ]
        self.statements = [statement for statement in found if statement]

    @property
    def text(self) -> str:
        lines = [f"void {self.symbol}(const uint64_t* parameters) {{"]
        lines += [f"  alignas(128) static char shared[{self.shared_bytes + 1}];"]
        lines += [f"  {line};" for line in (*self.registers, *self.statements)]
        return "\n".join([*lines, "}", ""])

    def _statement(self, text: str) -> str:
        if declared := re.fullmatch(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>", text):
            names = ", ".join(f"{declared[2]}{i}{{}}" for i in range(int(declared[3])))
            self.registers.append(f"{TYPES[declared[1]]} {names}")
            return ""
        if declared := re.fullmatch(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            align = int(declared[1])
            start = -(-self.shared_bytes // align) * align
            self.shared[declared[2]], self.shared_bytes = start, start + int(declared[3])
            return ""
        if not text or text.startswith("griddepcontrol"):
            return ""
        if text.endswith(":"):
            return text.replace("$", "")
        guard = re.match(r"@(!?)%(p\d+)\s+", text)
        call = self._instruction(text[guard.end() :] if guard else text)
        return f"if ({guard[1]}{guard[2]}) {call}" if guard else call

    def _instruction(self, text: str) -> str:
        name, _, rest = re.sub(r"\s+", " ", text).partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\s]+", rest)
        parts = name.split(".")
        if parts[0] == "ret":
            return "return"
        if parts[0] == "bra":
            return f"goto {operands[0].replace('$', '')}"
        if name.startswith("ld.param"):
            index = self.parameters.index(operands[1].strip("[]"))
            return f"{operands[0][1:]} = parameters[{index}]"
        type = TYPES.get(parts[-1], "")
        if parts[0] in ("ld", "st"):
            at, moved = operands if parts[0] == "st" else operands[::-1]
            values = ", ".join(self._value(one) for one in re.findall(r"[^{},\s]+", moved))
            verb = "store" if parts[0] == "st" else "load"
            return f"{verb}<{type}>({self._address(at, parts[1])}, {values})"
        own = [p for p in parts if p not in TYPES]
        function = f"{own[0]}_" if own[0] in KEYWORDS else "_".join(own)
        if not type:
            return f"{function}({', '.join(map(self._value, operands))})"
        types = ", ".join(TYPES[p] for p in parts if p in TYPES)
        values = ", ".join(self._value(one) for one in operands[1:])
        return f"put({operands[0].split('|')[0][1:]}, {function}<{types}>({values}))"

    def _value(self, text: str) -> str:
        if special := re.fullmatch(r"%(tid|ctaid)\.(\w)", text):
            return f"{'threadIdx' if special[1] == 'tid' else 'blockIdx'}.{special[2]}"
        if text.startswith("%"):
            return text[1:]
        if text.startswith("{"):
            return (
                f"pair_of({', '.join(self._value(one.strip()) for one in text[1:-1].split(','))})"
            )
        if text.lower().startswith("0f"):
            return f"float_of(0x{text[2:]}u)"
        return str(self.shared[text]) if text in self.shared else f"{text}ll"

    def _address(self, text: str, space: str) -> str:
        base, _, offset = text.strip("[]").partition("+")
        place = f"{self._value(base)} + {offset or 0}ll"
        if space == "shared":
            return f"shared + ({place})"
        return f"reinterpret_cast<char*>({place})"


class OnCpu:
    """The launches of an op, callable on arrays: operands, then outputs, which are written to."""

    def __init__(self, launches: Sequence[AnyLaunch], arch: CudaArch, folder: Path) -> None:
        self.launches = launches
        rendered = [render(launch, "kernel") for launch in launches]
        kernels = [
            Translation(ptx_of(source, symbol, arch), launch.shared_bytes)
            for launch, (symbol, source) in zip(launches, rendered, strict=True)
        ]
        text = '#include "ptx_on_cpu.h"\n' + "\n".join(kernel.text for kernel in kernels)
        for i, kernel in enumerate(kernels):
            text += (
                f'extern "C" void run{i}(int x, int y, int threads, const uint64_t* values) {{\n'
                f"  launch(x, y, threads, [&] {{ {kernel.symbol}(values); }});\n}}\n"
            )
        self.library = cpp_on_cpu.build(text, folder / f"{kernels[0].symbol}.cpp", HERE)

    def __call__(self, rows: int, arrays: Sequence[Array]) -> None:
        """Run every launch with `rows` rows."""
        values = (ctypes.c_uint64 * (1 + len(arrays)))(rows, *(a.ctypes.data for a in arrays))
        for i, launch in enumerate(self.launches):
            getattr(self.library, f"run{i}")(*launch.grid[:2], launch.block, values)
