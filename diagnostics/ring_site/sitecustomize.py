"""Stands first on PYTHONPATH of the ranks: records the calls of torch.distributed once the program imports it.

Python imports a module of this name at every start. A program that never imports torch pays for nothing but this file;
another `sitecustomize` further along the path runs as if this one were not there. Nothing here may fail.

With `slurm.ranks_per_task`, the program that a launcher starts as a rank becomes the runner of that rank first.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def run_next():
    """Import the sitecustomize that this one hides, if there is one."""
    import importlib.machinery

    path = [each for each in sys.path if os.path.abspath(each or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def with_tools(name):
    """Return one of the modules next to this folder, which stays off the program's path."""
    import importlib

    sys.path.append(os.path.dirname(HERE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(os.path.dirname(HERE))


def begin_trace():
    """Trace calls from the start: `trace.json` is there already."""
    try:
        with_tools("ring_hook").follow_trace()
    except Exception as error:
        os.write(2, ("bsl: calls are not traced: %r\n" % (error,)).encode())


def become_runner(runner):
    """Replace this process, which a launcher has started as a rank, by its runner, which starts the program again."""
    try:
        with open("/proc/self/cmdline", "rb") as stream:
            words = stream.read().split(b"\0")[1:-1]
        import shlex

        argv = [os.fsencode(word) for word in shlex.split(runner)]
        os.execv(argv[0], [*argv, b"--", os.fsencode(sys.executable), *words])
    except Exception as error:
        os.write(2, ("bsl: no records of rank %s: %r\n" % (os.environ["RANK"], error)).encode())


class WhenImported:
    """Finds modules as others do, and hands those that are to be watched to `ring_torch` once they are loaded."""

    NAMES = (
        "torch.distributed.distributed_c10d",
        "torch.serialization",
        "torch.utils.data.dataloader",
        "torch.optim.optimizer",
        "torch.autograd",
        "torch.nn.parallel.distributed",
    )

    def find_spec(self, name, path=None, target=None):
        if name not in self.NAMES:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return self.watching(spec)
        return None

    def watching(self, spec):
        original = getattr(spec.loader, "exec_module", None)
        if original is None:
            return spec

        def exec_module(module):
            original(module)
            try:
                with_tools("ring_torch").watch(module)
            except Exception as error:
                os.write(2, ("bsl: calls of %s are not recorded: %r\n" % (module.__name__, error)).encode())

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RANK", "").isdecimal() and "BSL_WORKER_RUNNER" in os.environ:
    become_runner(os.environ.pop("BSL_WORKER_RUNNER"))
if os.environ.get("BSL_RING_DIR") and sys.version_info >= (3, 8):
    sys.meta_path.insert(0, WhenImported())
    if os.path.exists(os.environ.get("BSL_TRACE", "")):
        begin_trace()
run_next()
