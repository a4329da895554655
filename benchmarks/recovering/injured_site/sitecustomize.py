"""Lets a benchmark injure a Python process from inside: an exit code, an exception in its main thread, or any code.

A thread looks for files that are named after the process in the folder `BSL_INJURIES`: `PID` holds `exit` or
`exception`, `PID.py` a program, which is run in that thread and whose traceback, if any, is left in `PID.error`.

With `BSL_NCCL_LIKE`, ranks communicate over the backend in that folder.
"""

import ctypes
import os
import sys
import threading
import time
import traceback
from pathlib import Path

EXIT_CODE = 41
LOOK_S = 0.005


def _wait(folder: Path) -> None:
    while True:
        name = str(os.getpid())  # a fork has another one than its parent
        if (folder / f"{name}.py").exists():
            _run(folder / f"{name}.py")
        if (folder / name).exists():
            break
        time.sleep(LOOK_S)
    if (folder / name).read_text(encoding="ascii").strip() == "exit":
        os._exit(EXIT_CODE)
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(RuntimeError))


def _run(program: Path) -> None:
    text = program.read_text(encoding="utf-8")
    program.unlink()
    try:
        exec(compile(text, str(program), "exec"), {"__name__": "injury"})
    except BaseException:
        program.with_suffix(".error").write_text(traceback.format_exc(), encoding="utf-8")


if folder := os.environ.get("BSL_INJURIES"):
    threading.Thread(target=_wait, args=(Path(folder),), daemon=True).start()

if folder := os.environ.get("BSL_NCCL_LIKE"):
    sys.path.append(folder)
    import nccl_like_site  # noqa: F401
