"""Writes the stored weights and what PyTorch computes from them in f32."""

import json
import math
import os
import subprocess
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import data
import net as netmod

SAMPLE = 8192   # bytes of the held-out sample in the reference file
REPORT = 131072  # bytes of the held-out sample whose result is printed
PROMPTS = [
    "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(",
    "// Copyright 2009 The Go Authors. All rights reserved.\n// Use of this source code is",
    "func (r *Reader) Read(p []byte) (n int, err error) {\n\tif err != nil {\n\t\treturn ",
    "x",
]


@torch.no_grad()
def bits_per_byte(net, pieces, stride=256):
    """Bits per byte over pieces: windows of the model's context that start
    every stride bytes, a zero in front; the first scores all its bytes, each
    later one only those that no earlier window has scored."""
    T = net.c["context"]
    bits, n = 0.0, 0
    for piece in pieces:
        b = torch.tensor(list(piece))
        scored, s = 0, 0
        while scored < len(b):
            y = b[s : s + T]
            x = torch.cat([torch.zeros(1, dtype=torch.long), y[:-1]])
            nll = F.cross_entropy(net(x[None])[0][0], y, reduction="none")[scored - s :]
            bits += nll.double().sum().item() / math.log(2)
            n += len(nll)
            scored, s = s + len(y), s + stride
    return bits / n, n


@torch.no_grad()
def write(net, held, out):
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, "model.safetensors")
    # One metadata key only: the file's bytes are the same on every run.
    save_file(netmod.to_tensors(net), path, metadata={"config": json.dumps(net.c)})
    net = netmod.from_tensors(load_file(path), net.c)

    pieces = data.sample(held, SAMPLE)
    bpb, n = bits_per_byte(net, pieces)
    out_tensors = {
        "sample": torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8),
        "pieces": torch.tensor([len(p) for p in pieces], dtype=torch.int32),
    }
    texts = [p.encode() for p in PROMPTS] + [pieces[0][: net.c["context"] - 1]]
    for i, text in enumerate(texts):
        tokens = torch.tensor([0] + list(text))
        logits = net(tokens[None])[0][0]
        out_tensors[f"text.{i}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        out_tensors[f"logits.{i}"] = logits[-8:].contiguous()  # of the last 8 rows
    go = subprocess.check_output(["go", "env", "GOVERSION"], text=True).strip()
    save_file(out_tensors, os.path.join(out, "reference.safetensors"),
              metadata={"bits_per_byte": repr(bpb), "torch": torch.__version__, "go": go, "texts": str(len(texts))})
    print(f"held-out sample of {n} bytes of {go}: {bpb:.4f} bits/byte (f32, stored f16 weights)")
    bpb, n = bits_per_byte(net, data.sample(held, REPORT))
    print(f"held-out sample of {n} bytes of {go}: {bpb:.4f} bits/byte")
    print(f"wrote {path}: {os.path.getsize(path)} bytes")


if __name__ == "__main__":  # python reference.py checkpoint.pt ../weights
    c = torch.load(sys.argv[1])
    n = netmod.Net()
    n.load_state_dict(c["net"])
    write(n, data.corpus()[1], sys.argv[2])
