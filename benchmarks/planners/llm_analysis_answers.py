"""Answers of llm-analysis for inputs in its own terms: a list as JSON on standard input, a list on standard output.

Runs with the interpreter of an environment that has llm-analysis. `../plan_peers.py` starts it.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from llm_analysis.analysis import train

MEMORY = "(weight+op_state+grad+act)_memory_per_gpu"


def answer(asked: dict[str, Any], model: Path) -> dict[str, Any]:
    # The tool remembers models by their name.
    named = {"name": model.stem, **asked["model"]}
    model.write_text(json.dumps(named), encoding="utf-8")
    try:
        summary = train(model_name=str(model), log_level="ERROR", **asked["train"])
    except AssertionError as error:
        return {"reason": f"refused: {error}"}
    return {"seconds": summary["latency_per_iter"], "memory_gib": summary[MEMORY] / 2**30}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        answers = [answer(asked, Path(folder) / f"row{n}.json") for n, asked in enumerate(json.load(sys.stdin))]
    print(json.dumps({"version": importlib.metadata.version("llm-analysis"), "answers": answers}))
