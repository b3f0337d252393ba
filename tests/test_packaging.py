"""Every way to install the package ends with the same importable files. No network is used."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import rl_staleness
import rl_staleness.integrations

ROOT = Path(__file__).resolve().parent.parent
TOLD = ("README.md", "LICENSE", "SECURITY.md", "CHANGELOG.md")
PACKAGED = ("setup.cfg", "pyproject.toml", "MANIFEST.in", *TOLD, "rl_staleness", "integrations")

PROBE = """
import importlib.metadata, importlib.util, json
from pathlib import Path
import rl_staleness, rl_staleness.integrations

core = Path(rl_staleness.__file__).resolve().parent
integrations = Path(rl_staleness.integrations.__file__).resolve().parent
print(json.dumps({
    "version": importlib.metadata.version("rl-staleness"),
    "core": sorted(path.name for path in core.glob("*.py")),
    "integrations": sorted(path.name for path in integrations.glob("*.py")),
    "typed": (core / "py.typed").is_file(),
    "top_level_integrations": importlib.util.find_spec("integrations") is not None,
    "folders": [str(core), str(integrations)],
}))
"""

TRACE = """\
{"event":"run_started","time":1.0,"schema":1,"run":"r","incarnation":0,"version":7,"step":1}
{"event":"group_published","time":2.0,"group":"g","tokens":{"5":3,"7":1}}
{"event":"step_trained","time":3.0,"step":1,"version":7,"groups":["g"]}
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees nothing of this checkout, and shows its output if it fails."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the package is built from, with the link as it is."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an installation needs: msgspec, and setuptools to build."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("msgspec", "setuptools"):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or []}
        for top in tops - {"..", "__pycache__"}:
            (folder / top).symlink_to(str(distribution.locate_file(top)))
    return folder


@pytest.fixture
def python(tmp_path: Path, libraries: Path) -> Path:
    """The interpreter of a fresh virtual environment that has ``libraries`` and nothing else."""
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    return tmp_path / "venv" / "bin" / "python"


def pip_install(python: Path, *what: str | Path, cwd: Path) -> None:
    """Installs into the environment of ``python``; pip itself finds that its msgspec will do."""
    offline = ("--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, *what, cwd=cwd)


def build(checkout: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel made from that sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=checkout)
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    (wheel,) = (checkout / "dist").glob("*.whl")
    return sdist, wheel


def check_installed(python: Path) -> list[Path]:
    """Compares an installation with this checkout; returns the folders it imports from."""
    empty = python.parent / "elsewhere"
    empty.mkdir()
    found = json.loads(run(python, "-c", PROBE, cwd=empty).stdout)
    version = metadata()["metadata"]["version"]
    folders = [Path(folder) for folder in found.pop("folders")]

    assert found == {
        "version": version,
        "core": names(ROOT / "rl_staleness"),
        "integrations": names(ROOT / "integrations"),
        "typed": True,
        "top_level_integrations": False,
    }
    check_commands(python, version, cwd=empty)
    return folders


def check_commands(python: Path, version: str, *, cwd: Path) -> None:
    (cwd / "trace.jsonl").write_text(TRACE, encoding="utf-8")
    command = python.parent / "rl-staleness"
    table = run(command, "steps", "trace.jsonl", cwd=cwd).stdout

    assert version in run(command, "--version", cwd=cwd).stdout
    assert run(python, "-m", "rl_staleness.trace", "trace.jsonl", cwd=cwd).stdout == table
    assert json.loads(run(command, "steps", "trace.jsonl", "--json", cwd=cwd).stdout)[
        "batch_age"
    ] == pytest.approx(1.5)


def site_packages(python: Path) -> Path:
    (folder,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return folder.resolve()


def test_the_checkout_imports_integrations_from_their_own_folder():
    """The link is there, relative, and not a copy."""
    link = ROOT / "rl_staleness" / "integrations"

    assert link.is_symlink()
    assert os.readlink(link) == "../integrations"
    assert Path(rl_staleness.__file__).resolve().parent == ROOT / "rl_staleness"
    assert Path(rl_staleness.integrations.__file__).resolve().parent == ROOT / "integrations"


def test_pip_install_of_a_checkout(checkout: Path, python: Path):
    pip_install(python, ".", cwd=checkout)

    assert check_installed(python) == [
        site_packages(python) / "rl_staleness",
        site_packages(python) / "rl_staleness" / "integrations",
    ]


def test_pip_install_of_a_checkout_without_links(checkout: Path, python: Path):
    """A zip download and some file systems have no symbolic links."""
    (checkout / "rl_staleness" / "integrations").unlink()
    pip_install(python, ".", cwd=checkout)

    check_installed(python)


def test_editable_install_sees_the_checkout_and_files_added_later(checkout: Path, python: Path):
    pip_install(python, "--editable", ".", cwd=checkout)

    assert check_installed(python) == [checkout / "rl_staleness", checkout / "integrations"]
    (checkout / "integrations" / "later.py").touch()
    run(python, "-c", "import rl_staleness.integrations.later", cwd=python.parent)


def test_sdist_installs(checkout: Path, python: Path):
    sdist, _ = build(checkout)
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if not (member.isfile() or member.isdir())]
        assert set(TOLD) <= {name.partition("/")[2] for name in archive.getnames()}
    pip_install(python, sdist, cwd=checkout.parent)

    check_installed(python)


def test_wheel_works_with_the_source_away(checkout: Path, python: Path, tmp_path: Path):
    """The wheel is made from the sdist, holds one package, and needs nothing of the checkout."""
    _, wheel = build(checkout)
    wheel = Path(shutil.move(wheel, tmp_path))
    shutil.rmtree(checkout)
    pip_install(python, wheel, cwd=tmp_path)
    version = metadata()["metadata"]["version"]

    assert top_levels(zipfile.ZipFile(wheel).namelist()) == {
        "rl_staleness",
        f"rl_staleness-{version}.dist-info",
    }
    check_installed(python)


def top_levels(members: Sequence[str]) -> set[str]:
    return {member.partition("/")[0] for member in members}


def test_extras_are_the_documented_ones():
    assert set(metadata()["options.extras_require"]) == {
        "vllm",
        "torch",
        "ray",
        "wandb",
        "mlflow",
        "trl",
        "report",
        "dev",
    }
