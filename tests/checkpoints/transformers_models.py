"""Random models of transformers itself, and the folders that we save for it: what the tests against it share."""
from typing import Any

from tests.checkpoints import llama_golden
from tests.strategies import close

SIZES = dict(num_hidden_layers=3, hidden_size=24, num_attention_heads=6, vocab_size=37, intermediate_size=36,
             max_position_embeddings=9, bos_token_id=0, eos_token_id=0, pad_token_id=None, initializer_range=0.3)


def random_model(transformers, name: str, choices: dict[str, Any], seed: int):
    """Return a model whose weights, biases and gains are so large that an error in any of them shows."""
    import torch

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES | choices)
    model = llama_golden.in_float64(getattr(transformers, f"{name}ForCausalLM")(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def opens_as(transformers, folder, theirs):
    """Check that transformers opens a folder as this model: no key is missing, none is too many, and the parameters are
    the same to the bit, so the logits are the same.
    """
    import torch

    opened, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    assert opened.dtype == torch.float64
    for (name, x), (other, y) in zip(opened.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(x, y)
    tokens = torch.arange(7)[None]
    close(llama_golden.in_float64(opened).eval()(tokens).logits.detach().numpy(),
          theirs.eval()(tokens).logits.detach().numpy(), 1e-14)
