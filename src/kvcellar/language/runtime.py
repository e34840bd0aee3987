"""Which runtime computed a distribution: a model-coded log is decoded only where the same numbers come again.

The last bits of a model's logits depend on the libraries, the kernels they pick for this processor, the number of
threads, the dtype, and the attention in use. Whatever of that can be asked goes into one hash; two runtimes of one
hash that still differ are caught by the log's checksum of its ids.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..identity import frame
from .fields import RUNTIME_BYTES

_KERNEL_CHOICE = ("ATEN_", "ONEDNN", "DNNL", "MKL_", "OPENBLAS", "CUBLAS", "NVIDIA_TF32", "TORCH_MKLDNN")


def runtime_facts(model: Any) -> dict[str, str]:
    """What the last bits of this model's logits depend on, here and now."""
    import transformers

    parameter = next(iter(model.parameters()))
    device = parameter.device
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    chosen = sorted((k, v) for k, v in os.environ.items() if k.startswith(_KERNEL_CHOICE))
    return {
        "torch": torch.__version__,
        "build": torch.__config__.show(),
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()} {_processor()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "dtypes": " ".join(sorted({str(p.dtype) for p in model.parameters()})),
        "attention": str(getattr(model.config, "_attn_implementation", "")),
        "device": f"{device.type} {cuda}",
        "precision": f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}",
        "mkldnn": f"{torch.backends.mkldnn.enabled}",
        "environment": repr(chosen),
        "class": type(model).__name__,
    }


def runtime_id(model: Any) -> bytes:
    """The first 4 bytes of the SHA-256 over `runtime_facts`."""
    facts = runtime_facts(model)
    told = frame("kvcellar-runtime/1", [f"{key}={facts[key]}" for key in sorted(facts)])
    return hashlib.sha256(told).digest()[:RUNTIME_BYTES]


def _processor() -> str:
    """Model and features of the processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    told = ("model name", "flags", "Features", "CPU part")
    return "; ".join(line.partition(":")[2].strip() for line in lines if line.startswith(told))
