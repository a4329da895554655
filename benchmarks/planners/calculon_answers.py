"""Answers of calculon for inputs in its own terms: a list as JSON on standard input, a list on standard output.

Runs with the folder of calculon on PYTHONPATH. `../plan_peers.py` starts it.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from calculon.llm import Llm, System


def answer(asked: dict[str, Any], systems: Path) -> dict[str, Any]:
    system = System(json.loads((systems / asked["system"]).read_text(encoding="utf-8")))
    model = Llm(Llm.Application(asked["application"]), logging.getLogger())
    try:
        model.compile(system, Llm.Execution.from_json(asked["execution"]))
    except (Llm.Error, AssertionError) as error:
        return {"reason": f"refused: {error}"}
    try:
        model.run(system)
    except Llm.Error:
        return {"memory_gib": model.get_mem_tier1_cap_req() / 2**30, "reason": "out of memory, says the tool"}
    return {"seconds": model.get_total_time(), "memory_gib": model.get_mem_tier1_cap_req() / 2**30}


if __name__ == "__main__":
    systems = Path(sys.argv[1]) / "systems"
    print(json.dumps([answer(asked, systems) for asked in json.load(sys.stdin)]))
