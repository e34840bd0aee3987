"""The same input gives the same bytes, whatever the threads and the processor's instructions (design rule D4)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hashlib, sys
import numpy as np, torch
import kvcellar
rng = np.random.default_rng(5)
scale = 2.0 ** rng.integers(-6, 7, (1, 2, 1, 24))
digest = hashlib.sha256()
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    sides = [torch.from_numpy(rng.normal(size=(1, 2, 700, 24)) * scale).to(dtype) for _ in range(4)]
    path = sys.argv[1] + f"/{dtype}.kvc"
    kvcellar.save(path, [tuple(sides[:2]), tuple(sides[2:])], tokens=range(700), identity="m")
    with open(path, "rb") as file:
        digest.update(file.read())
    with kvcellar.open(path, identity="m") as archive:
        for layer in range(2):
            for side in archive.read(layer, 0, 700):
                digest.update(side.contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
"""
SETTINGS = [("1", None), ("2", None), ("2", "default"), ("1", "avx2"), ("2", "avx512")]


def test_exact_gives_the_same_file_on_other_threads_and_kernels(tmp_path: Path) -> None:
    seen, kernels = set(), set()
    for threads, capability in SETTINGS:
        environ = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        if capability:
            environ["ATEN_CPU_CAPABILITY"] = capability
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environ, capture_output=True, text=True, check=True
        )
        digest, used, kernel = done.stdout.split()
        assert used == threads
        seen.add(digest)
        kernels.add(kernel)
    assert len(seen) == 1
    assert len(kernels) > 1, f"only {kernels} ran: nothing was compared"
