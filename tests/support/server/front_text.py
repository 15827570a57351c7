"""Text of a target in a web server process: python -m tests.support.server.front_text FOLDER...

It prints the result of `front_text` for each folder, and whether torch was loaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import peagle.server.http_workers.front_process
import peagle.server.run  # noqa: F401  Both processes must start without torch.
from peagle.server.front.generation_params import GenerationParams
from peagle.server.front.target_text import TargetText
from peagle.server.messages import EngineInfo, EngineKey, TargetInfo
from peagle.server.settings import ServerSettings
from peagle.server.tokenization.early_tokenizer import EarlyTokenizer

SENTENCE = "w6 w9 the quick brown fox, über café 東京"
MAX_TOKENS = 4096


def front_text(folder: Path) -> dict[str, Any]:
    """Ids of a text and of a chat, the texts of the ids, and the text of an answer."""
    engine = EngineInfo("p-eagle", MAX_TOKENS, 4096)
    key = EngineKey("p-eagle", 2)
    target = TargetInfo("tiny", str(folder), [1], engine, key, ["p-eagle"])
    early = EarlyTokenizer(ServerSettings(pair=str(folder)))
    early.start()
    text = TargetText.load(target, early)
    ids = text.tokenizer.encode(SENTENCE, MAX_TOKENS)
    messages = [{"role": "user", "content": SENTENCE}]
    detokenizer = text.detokenizer(GenerationParams(max_tokens=MAX_TOKENS), MAX_TOKENS)
    return {
        "class": type(text.tokenizer.tokenizer).__name__,
        "ids": ids,
        "chat": text.tokenizer.encode_chat(messages, {}, MAX_TOKENS).ids,
        "tokens": [text.texts.text(token) for token in ids],
        "answer": "".join(detokenizer.push([token]).text for token in ids) + detokenizer.finish(),
    }


if __name__ == "__main__":
    texts = [front_text(Path(folder)) for folder in sys.argv[1:]]
    print(json.dumps({"texts": texts, "torch": "torch" in sys.modules}))
