"""What a patching sweep of Pythia-12B costs on several GPUs, by the counts of a plan: nothing of that size runs here.

The plan is that of a GPT-NeoX of as many blocks, heads and tokens, but 16 times narrower, so its counts are those of
Pythia-12B. What grows with the width is scaled, what is cut to a limit is not, and time is operations divided by what a
GPU is taken to give, without loading the model::

    python docs/tools/large_sweep.py
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import probelens as pl

LAYERS, WIDTH, HEADS, VOCAB, PARAMETERS = 36, 5120, 40, 50688, 11_846_072_320
NARROWER = 16
BF16 = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument(
        "--flops",
        type=float,
        default=1.5e14,
        help="operations a second of one GPU; 1.5e14 is half of an A100's peak in bfloat16",
    )
    args = parser.parse_args()
    width = WIDTH // NARROWER
    config = GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * width, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = pl.wrap(GPTNeoXForCausalLM(config).eval())
    clean = torch.randint(1000, (args.pairs, args.length))
    corrupted = clean.clone()
    corrupted[:, args.length // 4] += 1
    answers = torch.tensor([[1, 2]]).expand(args.pairs, 2)
    pairs = pl.PatchPairs(clean, corrupted, read_pos="last", answers=answers)
    plan = pl.patch_plan(model, pairs, "resid_pre", batch_size=args.batch)
    print(plan)
    block = 24 * WIDTH**2 + 4 * WIDTH * args.length
    readout = 2 * WIDTH * VOCAB
    total = plan.block_positions * block + plan.unembedded * readout
    naive = plan.naive_block_positions * block + plan.naive_unembedded * readout
    # The narrow model's plan counts float32; the other parts are limits in bytes, whatever the model.
    wide = sum(plan.sweep.held.get(name, 0) for name in ("states", "residuals", "source"))
    held = plan.sweep.bytes - wide + wide * NARROWER * BF16 // 4
    print(f"\noperations: {total:.3g}, with a whole forward for each patch {naive:.3g}")
    hours = total / args.flops / args.gpus / 3600
    print(
        f"{args.gpus} GPUs at {args.flops:.3g} a second: {hours * 60:.1f} min, {naive / total * hours * 60:.0f} min with whole "
        f"forwards; in each GPU {PARAMETERS * BF16 / 1e9:.1f} GB of weights and up to {held / 1e9:.2f} GB held"
    )


if __name__ == "__main__":
    main()
