"""A request of the front as the message that adds it to an engine."""

from dataclasses import fields

from peagle.core import Sampling
from peagle.server.front.generation_params import GenerationParams
from peagle.server.messages import Add, EngineKey

SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def add_message(request_id: int, key: EngineKey, ids: list[int], params: GenerationParams) -> Add:
    sampling = {name: getattr(params.sampling, name) for name in SAMPLING_FIELDS}
    sampling["logit_bias"] = dict(params.sampling.logit_bias)
    return Add(
        id=request_id,
        engine=key,
        prompt=ids,
        max_tokens=params.max_tokens,
        sampling=sampling,
        min_tokens=params.min_tokens,
        stop_ids=sorted(params.stop_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        grammar=params.grammar,
        user=params.user,
        cache_salt=params.cache_salt,
        thinking=params.thinking,
        learn=params.learn,
    )
