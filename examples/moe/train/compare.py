"""Compares the logits of PyTorch and of the Go code on the same stored weights.

  python compare.py            (from anywhere; needs go in PATH)

Texts: 511-byte pieces of held-out files and the prompts of reference.py. Every
row of every text is compared.
"""

import json
import os
import subprocess
import tempfile

import torch
from safetensors.torch import load_file

import data
import net as netmod
import reference

HERE = os.path.dirname(os.path.abspath(__file__))
WEIGHTS = os.path.join(HERE, "..", "weights", "model.safetensors")


@torch.no_grad()
def main():
    net = netmod.from_tensors(load_file(WEIGHTS))
    context = net.c["context"]
    texts = [p.encode() for p in reference.PROMPTS]
    texts += [p[: context - 1] for p in data.sample(data.corpus()[1], 30 * data.PIECE)]
    worst, rows, differ = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as tmp:
        tool = os.path.join(tmp, "bpb")
        subprocess.check_call(["go", "build", "-o", tool, "./cmd/bpb"], cwd=os.path.join(HERE, ".."))
        for text in texts:
            out = subprocess.run([tool, "--weights", WEIGHTS, "--logits", "-"], input=text, stdout=subprocess.PIPE, check=True)
            got = torch.tensor(json.loads(out.stdout)["logits"]).view(-1, net.c["vocab"])
            want = net(torch.tensor([[0] + list(text)]))[0][0]
            worst = max(worst, (got - want).abs().max().item())
            differ += (got.argmax(-1) != want.argmax(-1)).sum().item()
            rows += len(want)
    print(f"{len(texts)} texts, {rows} rows of {net.c['vocab']} logits: largest difference {worst:.3g}, "
          f"another likeliest byte in {differ} rows")


if __name__ == "__main__":
    main()
