"""Measurements: a room for each topic.

    cpu         decoding on a CPU: methods, experts, n-gram drafts, busy cores
    drafter     drafters: training steps, ranks of candidates, formats, contexts, vocabularies
    engine      the engine in process: batches, draft shapes, steps of mixtures of experts
    exact       exact mode: the bits and times of its kernels, its answers and price under load
    kernels     kernels on a GPU: layers, products, experts, sampling, registers
    learning    learning from answers: domains, versions, swaps of a drafter
    llamacpp    peagle beside llama.cpp
    quantized   quantized targets and drafters: answers, divergence, acceptance
    server      `peagle serve`: load, start, processes that are killed, tool calls
    vllm        peagle's drafters in vLLM; its files run in vLLM's own environment

A file that measures is a command: `python -m benchmarks.ROOM.NAME`.
"""
