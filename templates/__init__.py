"""CUDA templates and the headers they share: data of memra_compiler/codegen/cuda.py."""
