"""Family F: the device. No GPU is needed: a small C library has the function names of the driver. See step_loop.py."""

from __future__ import annotations

import ctypes
import subprocess

from host_stall import HostStall
from step_loop import Training, main

SOURCE = """
#include <unistd.h>
int cudaStreamSynchronize(void *stream) { for (;;) pause(); return stream != 0; }
"""


class DeviceFault(HostStall):
    """H91: one device has failed, and the rank waits for a kernel that never ends."""

    def prepare(self) -> None:
        self.driver = self.load_driver()

    def stall(self) -> None:
        self.synchronize(self.driver)

    def load_driver(self) -> ctypes.CDLL:
        assert self.run_dir is not None
        library = self.run_dir / "lab" / "libcudart.so"
        argv = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(argv, input=SOURCE.encode(), check=True)
        return ctypes.CDLL(str(library))

    def synchronize(self, driver: ctypes.CDLL) -> None:
        driver.cudaStreamSynchronize(None)


RECIPES: dict[str, type[Training]] = {"device-fault": DeviceFault}

if __name__ == "__main__":
    main(RECIPES)
