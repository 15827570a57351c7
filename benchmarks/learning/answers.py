"""The target's answers for the benchmarks of learning, kept in files, and lengths of versions."""

import json
from pathlib import Path

import numpy as np
import torch

from peagle.data.bench import Task
from peagle.drafter.formats import checkpoint
from peagle.learn.document import StoredDocument, new_document
from peagle.learn.training.judge import AcceptedCounts, count_accepted
from peagle.paths import write_text
from peagle.target import Target
from peagle.train.data.documents import Documents, read_documents
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.features.features import FeatureExtractor
from peagle.train.objective.passes import DrafterPasses

K = 7
PACK_TOKENS = 1024
GROUP_ANCHORS = {"cpu": 128, "cuda": 1024}


def answered(path: Path, target: Target, tasks: list[Task], max_tokens: int) -> Documents:
    """The target's greedy answers to the tasks; a file that exists is used."""
    if not path.is_file():
        documents, _ = answer_tasks(target, tasks, max_tokens)
        write_text(path, "".join(record_line(documents, i) for i in range(len(documents))))
    return read_documents([path], target, target.context)


def record_line(documents: Documents, number: int) -> str:
    document = documents[number]
    start = int(np.flatnonzero(document.answer_mask)[0])
    ids = document.ids.tolist()
    return json.dumps({"key": document.key, "ids": ids, "spans": [[start, len(ids)]]}) + "\n"


def stored(documents: Documents) -> list[StoredDocument]:
    """The documents as a server stores them."""
    result = []
    for number in range(len(documents)):
        document = documents[number]
        start = int(np.flatnonzero(document.answer_mask)[0])
        ids = document.ids.tolist()
        result.append(new_document(ids[:start], ids[start:]))
    return result


def count_drafter(folder: Path, target: Target, documents: Documents) -> AcceptedCounts:
    """Accepted drafts at K=7 of the drafter in `folder`, on known answers, without decoding."""
    drafter = checkpoint.load(folder, target, torch.float32)
    drafter.set_embed_and_head(target.embedding, target.lm_head, drafter.target_ids)
    features = FeatureExtractor(target, drafter.config.aux_layer_ids or ())
    dtype = torch.float32 if target.dtype == torch.float32 else torch.bfloat16
    device = target.device.type
    replay = DraftReplay(
        DrafterPasses(drafter, dtype),
        features,
        PACK_TOKENS,
        flex=device == "cuda",
        group_size=GROUP_ANCHORS[device],
    )
    return count_accepted(replay, documents, K)
