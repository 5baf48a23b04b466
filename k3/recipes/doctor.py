"""What this machine has, and which way each operation takes on it and why."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

Row = tuple[str, str]
MATRIX = 512
"""Side of the square matrices whose product is timed."""


def machine(folder: Path) -> Iterator[Row]:
    """Rows (what, finding) about the machine; `folder` is where runs would be written."""
    import torch

    import k3

    yield "k3", f"{k3.__version__} from {Path(k3.__file__).parent}"
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch", torch.__version__ + ("" if _in_range(torch.__version__) else ", not 2.11-2.13")
    yield "device", _device()
    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    yield "memory", _memory()
    yield "disk", f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}"
    yield "BLAS", _blas()
    yield "fp32 product", f"{_rate('float32'):.0f} GFLOP/s ({MATRIX} cubed)"
    yield "bf16 product", f"{_rate('bfloat16'):.0f} GFLOP/s ({MATRIX} cubed)"
    for package, use in (("matplotlib", "curves in reports"), ("pyarrow", "Parquet corpora")):
        yield package, _version(package) or f"absent: no {use}"
    yield "triton", _version("triton") or "absent: GPU kernels are not available"
    yield "tensorboard", _version("tensorboard") or "absent: metrics.jsonl only"


def paths() -> Iterator[Row]:
    """Rows (operation, the way it takes here and why not a faster one)."""
    import torch

    from k3 import ops
    from k3.ops.kda import RECURRENT_TOKENS

    cuda = torch.cuda.is_available()
    kernels = sorted(path.stem for path in Path(ops.__path__[0]).glob("*_triton.py"))
    yield (
        "KDA",
        f"chunks of dense products; the recurrence for up to {RECURRENT_TOKENS} new tokens",
    )
    yield "MLA", "blocks with a running softmax; absorbed on cached latents when decoding"
    yield (
        "experts",
        (
            "grouped_mm where the inputs are bf16, else a product per expert"
            if cuda
            else "a product per expert: grouped_mm is used on CUDA with bf16 only"
        ),
    )
    yield "the others", "torch, with backward passes of our own"
    yield "kernels", ", ".join(kernels) or "none: this version has no Triton kernels of its own"
    yield "activations", "bf16 by default" if cuda else "fp32 by default (dtype=auto)"


def _in_range(torch_version: str) -> bool:
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return (2, 11) <= (major, minor) < (2, 14)


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else "no NVIDIA device found"
        return f"cpu ({why})"
    properties = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    return f"cuda: {count} x {properties.name}, {properties.total_memory / 1e9:.0f} GB each"


def _memory() -> str:
    """Physical memory, and the limit of the container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    if text.isdigit() and int(text) < total:
        return f"{int(text) / 1e9:.1f} GB (container limit; {total / 1e9:.1f} GB in the machine)"
    return f"{total / 1e9:.1f} GB"


def _blas() -> str:
    import torch

    names = [
        name
        for name, has in (
            ("MKL", torch.backends.mkl.is_available()),
            ("oneDNN", torch.backends.mkldnn.is_available()),
            ("OpenMP", torch.backends.openmp.is_available()),
        )
        if has
    ]
    line = next(
        (line.strip() for line in torch.__config__.show().split("\n") if "CPU capability" in line),
        "",
    )
    return ", ".join(names) + (f"; {line.split(':')[-1].strip()}" if line else "")


def _rate(dtype: str) -> float:
    """Best of three products, in GFLOP/s, on the device that training would use."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(MATRIX, MATRIX, device=device, dtype=getattr(torch, dtype))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * MATRIX**3 / best / 1e9


def _version(package: str) -> str:
    if find_spec(package) is None:
        return ""
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed"
