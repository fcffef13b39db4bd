"""The settings on which the rounding of a matrix product depends: device, libraries, options."""

import os
import platform
import re
from pathlib import Path

import torch

from holdfast.errors import ConfigError

# Environment variables by which torch or its libraries choose kernels or arithmetic.
ENVIRONMENT = {
    "cpu": (
        "ATEN_CPU_CAPABILITY",
        "DNNL_DEFAULT_FPMATH_MODE",
        "DNNL_MAX_CPU_ISA",
        "MKL_CBWR",
        "MKL_DYNAMIC",
        "MKL_ENABLE_INSTRUCTIONS",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "ONEDNN_MAX_CPU_ISA",
    ),
    "cuda": (
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
    ),
}
UNSET = "unset"
PRECISIONS = {"ieee": "highest", "tf32": "high", "bf16": "medium"}


def device_of(name: str | torch.device) -> torch.device:
    """Return the CPU or the CUDA device of a name; raise ConfigError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{str(name)!r} is no device; give cpu, cuda or cuda:INDEX") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"device {str(name)!r} cannot be calibrated; give cpu or cuda")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device {str(name)!r} is not here: {count} CUDA devices; give cpu")
    return torch.device("cuda", index)


def numeric_settings(device: torch.device) -> dict[str, str]:
    """Collect every setting that decides how products round on a device, as text, by name.

    Processes with equal settings run the same kernels. A CUDA device is identified by its model,
    not its index. Not covered: libraries that are preloaded or replaced under the same torch.
    """
    specific = _cuda_settings(device) if device.type == "cuda" else _cpu_settings()
    environment = {name: os.environ.get(name, UNSET) for name in ENVIRONMENT[device.type]}
    return {"device": device.type, "torch": str(torch.__version__), **specific, **environment}


def calibrate_command(settings: dict[str, str]) -> str:
    """Compose the command that measures under these settings, as far as it has options for them."""
    words = ["holdfast calibrate", f"--device {settings['device']}"]
    if "threads" in settings:
        words.append(f"--threads {settings['threads']}")
    if settings["fp32_precision"] != "ieee":
        words.append(f"--matmul-precision {PRECISIONS[settings['fp32_precision']]}")
    return " ".join(words)


def _cpu_settings() -> dict[str, str]:
    backends = torch.backends
    build = torch.__config__.show()
    mkldnn = backends.mkldnn.matmul  # type: ignore[attr-defined]
    return {
        "processor": _processor(),
        "cpu_capability": backends.cpu.get_cpu_capability(),
        "amx": str(torch.cpu._is_amx_tile_supported()),
        "blas": _found(r"BLAS_INFO=([^,\s]+)", build),
        "mkl": _found(r"Math Kernel Library Version (\S+)", build),
        "onednn": _found(r"MKL-DNN (v\S+)", build),
        "onednn_enabled": str(torch._C._get_mkldnn_enabled()),
        "threads": str(torch.get_num_threads()),
        "fp32_precision": _precision(mkldnn.fp32_precision),
    }


def _cuda_settings(device: torch.device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    matmul = torch.backends.cuda.matmul
    return {
        "processor": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
        "blas": str(torch.backends.cuda.preferred_blas_library()),
        "fp32_precision": _precision(matmul.fp32_precision),
        "fp16_reduced_precision_reduction": str(matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "fp16_accumulation": str(matmul.allow_fp16_accumulation),
    }


def _precision(setting: str) -> str:
    """Return the name of a precision; "none", torch's initial default, means ieee."""
    return "ieee" if setting == "none" else setting


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else "none"


def _processor() -> str:
    try:
        listing = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        listing = ""
    model = re.search(r"^model name\s*:\s*(.+)$", listing, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()
