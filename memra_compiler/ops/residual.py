"""Ends of a layer's halves that one launch makes: the residual, and every norm of it that follows.

`rmsnorm_add_quantise` is the same for a half with one branch and one reader; layers with experts
have two of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from memra_compiler.ir.types import TensorType
from memra_compiler.ops.base import Array, Op, Operand, Sample, expect, op, width
from memra_compiler.ops.cuda import CudaArch, Launch
from memra_compiler.ops.emit import Buffer, Kernel
from memra_compiler.ops.linear import MAX_ROWS
from memra_compiler.ops.norm import RMSNorm, RMSNormAdd, check_weight
from memra_compiler.ops.quantise import ROUNDINGS, RMSNormQuantise

_Item = TypeVar("_Item")


@op("residual_norms")
@dataclass(frozen=True)
class ResidualNorms(Op):
    """The residual, and norms of it in the formats of their readers.

    u = x + rmsnorm(y) * post [* scale]; outputs u and, for each weight, rmsnorm(u) * weight, times
    its factor if f32, rounded otherwise.

    Shapes: x, y [T, D], post [D], a weight [D] for each of `to`, scale [1] (optional) -> u [T, D]
    f32, [T, D] for each of `to`.
    """

    eps: float = 1e-6
    to: tuple[str, ...] = ()
    factors: tuple[float, ...] = ()

    operands: ClassVar[tuple[Operand, ...]] = (
        Operand("x"),
        Operand("y"),
        Operand("post", "$"),
        Operand("weight", "$"),
    )
    adds_planes: ClassVar[tuple[str, ...]] = ("y",)
    variadic = True
    #: Operands before `post` and after `x`.
    branches: ClassVar[int] = 1

    def parts(
        self, items: Sequence[_Item]
    ) -> tuple[list[_Item], list[_Item], list[_Item], list[_Item]]:
        """Operands as x and branches, weights of the branches and `post`, weights, scale."""
        rows, posts = 1 + self.branches, 2 * self.branches - 1
        weights = rows + posts
        end = weights + len(self.to)
        return (
            list(items[:rows]), list(items[rows:weights]), list(items[weights:end]),
            list(items[end : end + 1]),
        )  # fmt: skip

    def norms(self) -> list[RMSNorm | RMSNormQuantise]:
        """The norms of u."""
        return [
            RMSNorm(self.eps, factor=factor) if to == "f32" else RMSNormQuantise(self.eps, to)
            for to, factor in zip(self.to, self.factors, strict=True)
        ]

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        (x, *ys), posts, weights, scale = self.parts(types)
        expect(len(weights) == len(self.to) == len(self.factors), self,
               f"{len(weights)} weights for norms to {self.to}, times {self.factors}")  # fmt: skip
        for y, post in zip(ys, posts, strict=False):
            expect(y == x, self, f"{x} and {y} differ")
            check_weight(self, width(self, x), post)
        for to, factor in zip(self.to, self.factors, strict=True):
            expect(to == "f32" or factor == 1, self, f"rows rounded to {to} have no factor")
        (u,) = RMSNormAdd(self.eps).infer(x, ys[0], posts[-1], *scale)
        pairs = zip(self.norms(), weights, strict=True)
        return u, *(norm.infer(u, w)[0] for norm, w in pairs)

    def reference(self, rows: int, *arrays: Array) -> tuple[Array, ...]:
        (x, *ys), posts, weights, scale = self.parts(arrays)
        y = ys[0]
        if len(ys) == 2:
            (first,) = RMSNorm(self.eps).reference(rows, y, posts[0])
            (y,) = RMSNormAdd(self.eps).reference(rows, first, ys[1], posts[1])
        (u,) = RMSNormAdd(self.eps).reference(rows, x, y, posts[-1], *scale)
        pairs = zip(self.norms(), weights, strict=True)
        return u, *(norm.reference(rows, u, w)[0] for norm, w in pairs)

    def numeric_class(self, *types: TensorType) -> str:
        (x, *ys), posts, weights, scale = self.parts(types)
        steps = []
        if len(ys) == 2:
            steps.append(RMSNorm(self.eps).numeric_class(x, posts[0]))
            steps.append(RMSNormAdd(self.eps).numeric_class(x, x, posts[1]))
        steps.append(RMSNormAdd(self.eps).numeric_class(x, x, posts[-1], *scale))
        steps += [n.numeric_class(x, w) for n, w in zip(self.norms(), weights, strict=True)]
        return "; ".join(steps)

    def scratch_floats(self, *types: TensorType) -> int:
        return 2 * MAX_ROWS * width(self, types[0]) if self.branches == 2 else 0

    def lower_cpu(self, k: Kernel, *buffers: Buffer) -> None:
        outputs = 1 + len(self.to)
        scratch = buffers[-1]
        if self.branches == 2:
            buffers = buffers[:-1]
        (x, *ys), posts, weights, scale = self.parts(buffers[: len(buffers) - outputs])
        u, *outs = buffers[len(buffers) - outputs :]
        y = ys[0]
        if self.branches == 2:
            size = width(self, x.type)
            first, both = (
                Buffer(TensorType((MAX_ROWS, size)), k.part(scratch, at, MAX_ROWS * size).data)
                for at in (0, MAX_ROWS * size)
            )
            RMSNorm(self.eps).lower_cpu(k, y, posts[0], first)
            RMSNormAdd(self.eps).lower_cpu(k, first, ys[1], posts[1], both)
            y = both
        RMSNormAdd(self.eps).lower_cpu(k, x, y, posts[-1], *scale, u)
        for norm, w, out in zip(self.norms(), weights, outs, strict=True):
            norm.lower_cpu(k, u, w, out)

    def lower_cuda(self, arch: CudaArch, *types: TensorType) -> tuple[Launch, ...]:
        from memra_compiler.ops.cuda_kernels import residual_norms_launches

        return residual_norms_launches(self, arch, *types)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        x, w, s = TensorType((3, 64)), TensorType((64,)), TensorType((1,))
        before = (x,) * (1 + cls.branches) + (w,) * (2 * cls.branches - 1)
        three = (("to", ("a8", "f32", "bf16")), ("factors", (1.0, 0.125, 1.0)))
        return [
            Sample(before),
            Sample((*before, w, w, w), three),
            Sample((*before, w, w, w, s), three),
            *(Sample((*before, w, s), (("to", (to,)), ("factors", (1.0,)))) for to in ROUNDINGS),
        ]


@op("branch_norms")
@dataclass(frozen=True)
class BranchNorms(ResidualNorms):
    """`residual_norms` of a half with two branches, each with a norm of its own.

    u = x + rmsnorm(rmsnorm(y) * post_y + rmsnorm(z) * post_z) * post [* scale].

    Shapes: x, y, z [T, D], post_y, post_z, post [D], and on as in `residual_norms`.
    """

    operands = (
        Operand("x"),
        Operand("y"),
        Operand("z"),
        Operand("post_y", "$"),
        Operand("post_z", "$"),
        Operand("post", "$"),
        Operand("weight", "$"),
    )
    adds_planes = ("y", "z")
    branches: ClassVar[int] = 2
