"""What pyproject.toml cannot say: the packages, one of which, `memra_templates`, is `templates`."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(".", include=["memra_compiler*"]),
        *find_packages("runtime", include=["memra_runtime*"]),
        *find_packages("schedules"),
        "memra_templates",
    ]
)
