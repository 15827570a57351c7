"""A server in this process that learns."""

from typing import Any

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.worker.learning import WorkerLearning
from tests.support.server.serving import thread_engines

LEARN: dict[str, Any] = {"learn_size": 1.0}


def learning_of(backend: EngineBackend) -> WorkerLearning:
    worker = thread_engines(backend).source.worker
    assert worker is not None and worker.learning is not None
    return worker.learning
