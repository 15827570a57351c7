"""The engine process with steps that a test controls by the text of a file:

slow SECONDS   every step takes this much longer
raise          the next step fails, and empties the file
lose           the same, as the device is lost
die            every process kills itself before it loads anything
"""

import os
import signal
import sys
import time
from pathlib import Path

CONTROL_VARIABLE = "PEAGLE_TEST_CONTROL"
ERRORS = {"raise": "a step failed", "lose": "CUDA error: unspecified launch failure"}


def control_steps(file: Path) -> None:
    from peagle.server.engines.engine_factory import import_models

    # Import models like an engine process, without the modules that it does not need.
    import_models("cpu")
    from peagle.engine.loop import EngineLoop

    run = EngineLoop.run

    def controlled_run(loop: EngineLoop) -> bool:
        words = read_words(file)
        if words[:1] == ["slow"]:
            time.sleep(float(words[1]))
        if words and words[0] in ERRORS:
            file.write_text("")
            raise RuntimeError(ERRORS[words[0]])
        return run(loop)

    setattr(EngineLoop, "run", controlled_run)  # noqa: B010


def read_words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


if __name__ == "__main__":
    control = Path(os.environ[CONTROL_VARIABLE])
    if read_words(control) == ["die"]:
        print("no memory is left on this GPU", file=sys.stderr)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    control_steps(control)
    from peagle.server.worker.main import main

    main(sys.argv[1], sys.argv[2])
