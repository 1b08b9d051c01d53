"""memra-bench: where the time of a round goes, beside what this machine allows."""

from memra_runtime.bench.results import BenchResult
from memra_runtime.bench.run import Options, run_bench

__all__ = ["BenchResult", "Options", "run_bench"]
