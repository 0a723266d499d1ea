"""Trains a small Llama of transformers on random tokens, with warpsmith's ops in it and without, and compares.

python examples/train_llama.py                 both, 20 steps; prints losses and tokens/s
python examples/train_llama.py --plain         transformers' own forward alone
python examples/train_llama.py --hidden 1024 --layers 8 --length 2048
"""

import argparse
import time

import torch
import transformers
import warpsmith
from warpsmith.integrations.transformers import patch


def model_of(given, device):
    """The same weights at every call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=given.hidden,
        intermediate_size=4 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 32,
        num_key_value_heads=max(1, given.hidden // 128),
        max_position_embeddings=given.length,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).train()


def train(model, given, device):
    """Losses of all steps, and tokens a second."""
    optimizer = warpsmith.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1024, (given.batch, given.length), generator=generator).to(device)
    losses, begun = [], time.perf_counter()
    for _ in range(given.steps):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses).tolist()  # the host waits here for the first time
    return losses, given.steps * tokens.numel() / (time.perf_counter() - begun)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 20), ("batch", 4), ("length", 128), ("hidden", 128), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--plain", action="store_true", help="without warpsmith's ops")
    parser.add_argument("--attention", action="store_true", help="with warpsmith's attention as well")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    results = {"transformers": train(model_of(given, device), given, device)}
    if not given.plain:
        model = model_of(given, device)
        print(patch(model, attention=given.attention))
        results["warpsmith"] = train(model, given, device)
    for name, (losses, speed) in results.items():
        print(f"{name:<13} loss {losses[0]:.4f} to {losses[-1]:.4f}, {speed:,.0f} tokens/s")
    return results


if __name__ == "__main__":
    main()
