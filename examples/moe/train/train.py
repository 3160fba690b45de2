"""Trains the model on the Go tree's own source and writes the weights.

  python train.py --steps 3000 --out ../weights

Checkpoints go to --checkpoint every 200 steps; --resume continues from there.
Prints seed, time and loss; ends by writing model.safetensors and
reference.safetensors (see reference.py).
"""

import argparse
import math
import os
import sys
import time

import torch
import torch.nn.functional as F

import data
import net as netmod
import reference


def newton_schulz(g):
    """Roughly orthogonalises g [..., m, n] (the Muon update)."""
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


class Muon:
    def __init__(self, params, momentum=0.95):
        self.params, self.mu = list(params), momentum
        self.buf = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, lr, decay):
        for p, b in zip(self.params, self.buf):
            b.lerp_(p.grad, 1 - self.mu)
            u = newton_schulz(p.grad.lerp(b, self.mu))
            p.mul_(1 - lr * decay)
            p.add_(u, alpha=-lr * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)


def batch(stream, gen, size, T):
    """size windows of T bytes; the input is shifted by a zero in front."""
    at = torch.randint(0, len(stream) - T, (size,), generator=gen)
    y = stream[at[:, None] + torch.arange(T)].long()
    x = torch.cat([torch.zeros(size, 1, dtype=torch.long), y[:, :-1]], dim=1)
    return x, y


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--steps", type=int, default=3000)
    ap.add_argument("--minutes", type=float, default=21, help="end the schedule after this time even before --steps")
    ap.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.02, help="Muon's rate (matrices)")
    ap.add_argument("--adam", type=float, default=0.004, help="Adam's rate (the rest)")
    ap.add_argument("--aux", type=float, default=0.01, help="weight of the load-balancing loss")
    ap.add_argument("--checkpoint", default="checkpoint.pt")
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--out", default="", help="folder for the weights; nothing is written without it")
    a = ap.parse_args()

    torch.set_num_threads(a.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(a.seed)
    gen = torch.Generator().manual_seed(a.seed)
    train, held = data.corpus()
    stream = torch.frombuffer(bytearray(b"\0".join(t for _, t in train)), dtype=torch.uint8)
    print(f"seed {a.seed}, torch {torch.__version__}, {a.threads} threads, {a.steps} steps of {a.tokens} tokens")
    print(f"training text: {len(train)} files, {len(stream)} bytes; held out: {len(held)} files, "
          f"{sum(len(t) for _, t in held)} bytes", flush=True)

    net = netmod.Net()
    print(f"config {netmod.CONFIG}, {sum(p.numel() for p in net.parameters())} parameters", flush=True)
    matrices, rest = [], []
    for name, p in net.named_parameters():
        (matrices if p.ndim >= 2 and name not in ("embed", "head") and "router" not in name else rest).append(p)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(rest, lr=a.adam, betas=(0.9, 0.97), weight_decay=0.0)
    first, spent = 0, 0.0
    if a.resume and os.path.exists(a.checkpoint):
        c = torch.load(a.checkpoint)
        net.load_state_dict(c["net"])
        adam.load_state_dict(c["adam"])
        for b, s in zip(muon.buf, c["muon"]):
            b.copy_(s)
        gen.set_state(c["gen"])
        first, spent = c["step"], c["spent"]
        print(f"resumed at step {first}")

    start, mean, count = time.time() - spent, 0.0, 0
    for step in range(first, a.steps):
        done = max(step / a.steps, (time.time() - start) / 60 / a.minutes)
        last = step + 1 == a.steps or done >= 1
        done = min(done, 0.999)
        rate = min(1.0, (step + 1) / 30) * min(1.0, (1 - done) / 0.6)
        T = 256 if done < 0.85 else 512
        x, y = batch(stream, gen, a.tokens // T, T)
        logits, aux = net(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        (loss + a.aux * aux).backward()
        for g in adam.param_groups:
            g["lr"] = a.adam * rate
        muon.step(a.lr * rate, 0.01)
        adam.step()
        net.zero_grad(set_to_none=True)
        mean, count = mean + loss.item(), count + 1
        if (step + 1) % 50 == 0 or last:
            print(f"step {step + 1}/{a.steps} time {time.time() - start:.0f}s "
                  f"loss {mean / count:.4f} ({mean / count / math.log(2):.3f} bits/byte) aux {aux.item():.3f}", flush=True)
            mean, count = 0.0, 0
        if (step + 1) % 200 == 0 or last:
            torch.save(dict(net=net.state_dict(), adam=adam.state_dict(), muon=muon.buf, gen=gen.get_state(),
                            step=step + 1, spent=time.time() - start), a.checkpoint + ".new")
            os.replace(a.checkpoint + ".new", a.checkpoint)
        if last:
            break
    print(f"seed {a.seed}: trained {step + 1} steps in {time.time() - start:.0f}s, last loss {loss.item():.4f}")
    if a.out:
        reference.write(net, held, a.out)


if __name__ == "__main__":
    sys.exit(main())
