"""Cases of the refinement with the engine's kernels, for tests/support/kernels/kernel_cases.py."""

from functools import partial

import torch

from peagle.drafter import Drafter, DrafterConfig
from peagle.drafter.refinement import attend_in_blocks
from peagle.engine.model.fused_refinement import FusedRefinement
from tests.support.kernels.comparing import some

D = 64
VOCABULARY = 50


def some_drafter(device: str, dtype: torch.dtype) -> Drafter:
    config = DrafterConfig(
        method="p-eagle",
        num_layers=1,
        hidden_size=D,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        aux_layer_ids=None,
        target_hidden_size=D,
        num_taps=3,
        max_position_embeddings=64,
        mask_token_id=3,
        refinement=1,
    )
    drafter = Drafter(config)
    for i, weight in enumerate(drafter.parameters()):
        weight.data = 1 + 0.1 * some(*weight.shape, seed=i)
        if weight.ndim == 2:
            weight.data = some(*weight.shape, seed=i) * weight.shape[1] ** -0.5
    drafter = drafter.to(device, dtype).requires_grad_(False)
    tables = (some(VOCABULARY, D, seed=i).to(device, dtype) for i in (1, 2))
    drafter.set_embed_and_head(*tables)
    return drafter


@torch.inference_mode()
def check_refinement(batch: int, k: int, device: str, dtype: torch.dtype) -> None:
    drafter = some_drafter(device, dtype)
    assert drafter.refinement is not None
    normed = some(batch * k, D).to(device, dtype)
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(0, VOCABULARY, (batch * k,), generator=generator).to(device)
    depth = torch.arange(k, device=device).repeat(batch)
    expected = drafter.refine_rows(normed, ids, depth, attend_in_blocks(k))
    result = FusedRefinement(drafter, drafter.refinement)(normed, ids, k)
    assert result.dtype == dtype and result.shape == normed.shape
    near = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(result, expected, rtol=near, atol=near)
    assert (result - normed).abs().max() > 0.5


CASES = {
    "refine": partial(check_refinement, 3, 5),
    "refine, K=1": partial(check_refinement, 4, 1),
    "refine, many rows": partial(check_refinement, 24, 7),
}
