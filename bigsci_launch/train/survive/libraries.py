"""What DeepSpeed and Accelerate need in a process that outlives generations. Neither is imported here."""

from __future__ import annotations

import sys
from typing import Any

from bigsci_launch.train.survive.forget import forget_groups


def prepare_libraries() -> None:
    """Set what has to be set before process groups are formed."""
    if "deepspeed" in sys.modules:
        # Ranks on CPUs would add over shared memory, and no rank could leave such a sum.
        sys.modules["deepspeed.ops"].__compatible_ops__["deepspeed_shm_comm"] = False


def known_object(name: str, each: Any) -> Any:
    """Return an engine of DeepSpeed as an object that can be kept, and any other object as it is.

    Raises:
        BslError: the engine's state is not known.
    """
    engines = sys.modules.get("deepspeed.runtime.engine")
    if engines is None or not isinstance(each, engines.DeepSpeedEngine):
        return each
    from bigsci_launch.train.survive.zero import ZeroEngine

    return ZeroEngine(name, each)


def forget_everything(engine: Any) -> None:
    """Destroy all process groups, and `engine`, and make the libraries forget them."""
    if "deepspeed" in sys.modules:
        from bigsci_launch.train.survive.teardown import tear_down

        tear_down(engine)
        _count_again()
    else:
        forget_groups()
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:
        for each in (accelerate.GradientState, accelerate.AcceleratorState, accelerate.PartialState):
            each._reset_state()


def _count_again() -> None:
    """Let ZeRO stage 3 number parameters and modules from 0, as a new process does: ranks compare the numbers."""
    parameters: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    modules: Any = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if parameters is not None:
        parameters.Init.param_id = parameters.zero_init_context = 0
    if modules is not None:
        # Which of them counts, in the default of an argument, depends on the version.
        for name in ("_register_deepspeed_module", "_register_hooks_recursively"):
            register = getattr(modules.DeepSpeedZeRoOffload, name, None)
            for counter in (register.__defaults__ or ()) if register is not None else ():
                counter[0] = 0
